#!/usr/bin/env bash
# Prepares many document files under Slurm: a job array, whose tasks share lists of the files.
#
#   megatron-fanformer prepare dolma --lists 100 --output lists
#   sbatch --array=0-99 examples/prepare.sh lists data/dolma tokenizer.json
#   megatron-fanformer prepare --status lists
#   megatron-fanformer prepare --merge lists
#
# Task 7 begins with lists/007, which it prepares to data/dolma-007.bin, .idx, .ledger.parquet and .manifest.json, and
# goes on with lists that no other task has done or works on: what a lost task had begun is taken up where it was, and an
# array may have fewer tasks than there are lists. Submit it again for what is left. Further arguments are options of
# `prepare`. --merge checks that all is done, and writes what data.train_data reads as "@data/dolma.blend".
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

if (($# < 3)); then
    echo "usage: prepare.sh FOLDER_OF_LISTS PREFIX TOKENIZER [OPTION…], as a task of a job array" >&2
    exit 2
fi
task=${SLURM_ARRAY_TASK_ID:?start it as a task of a job array}
lists=$1 prefix=$2 tokenizer=$3
shift 3

exec "${PYTHON:-python3}" -m megatron_fanformer prepare --from-lists "$lists" --task "$task" --output "$prefix" \
    --tokenizer "$tokenizer" --workers "${SLURM_CPUS_PER_TASK:-1}" "$@"
