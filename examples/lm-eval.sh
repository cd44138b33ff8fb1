#!/usr/bin/env bash
# Scores an exported model with lm-eval on the task in lm-eval/, offline; the task is a template for your own.
#
#   pip install 'lm-eval[hf]'
#   examples/lm-eval.sh runs/demo-hf runs/demo-eval
#
# Arguments after the export and the folder for the results are passed to lm-eval: --tasks, --device, --batch_size, ...
#
# Variables, with their defaults:
#   PYTHON (python3)   the interpreter that has lm-eval; it need not have megatron_fanformer
set -euo pipefail

model=$(realpath -- "${1:?name an export}")
results=$(realpath -m -- "${2:?name a folder for the results}")
python=${PYTHON:-python3}
if [[ $python == */* ]]; then
    python=$(realpath -s -- "$python")  # the link itself: an environment's Python is known by where it is
fi
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/lm-eval"  # the task's data path is relative to it

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec "$python" -m lm_eval --model hf --model_args "pretrained=$model,trust_remote_code=True" \
    --include_path . --tasks continuations --output_path "$results" --log_samples "${@:3}"
