#!/usr/bin/env bash
# Prepares many document files under Slurm: a job array, each task of which encodes a shard of the files.
#
#   sbatch --array=0-99 examples/prepare.sh 100 dolma data/dolma tokenizer.json
#   megatron-fanformer prepare dolma --output data/dolma --tokenizer tokenizer.json --merge 100
#
# Task 7 encodes every hundredth file from the seventh on, and leaves the result in data/dolma.shard-7-of-100.parts.
# A task that was cut off goes on when it is submitted again (sbatch --array=7 …). Further arguments are options of
# `prepare`, and the merge is given the same ones. It names the shards that are not done; when all are, it writes
# data/dolma.bin, .idx, .ledger.parquet and .manifest.json as one machine's run would, and removes the shards.
#
#SBATCH --job-name=prepare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=500M
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

if (($# < 4)); then
    echo "usage: prepare.sh SHARDS DOCUMENTS PREFIX TOKENIZER [OPTION…], as a task of a job array from 0 to SHARDS-1" >&2
    exit 2
fi
task=${SLURM_ARRAY_TASK_ID:?start it as a task of a job array}
shards=$1 documents=$2 prefix=$3 tokenizer=$4
shift 4

exec "${PYTHON:-python3}" -m megatron_fanformer prepare "$documents" --shard "$task/$shards" --output "$prefix" \
    --tokenizer "$tokenizer" --workers "${SLURM_CPUS_PER_TASK:-1}" "$@"
