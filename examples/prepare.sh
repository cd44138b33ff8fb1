#!/usr/bin/env bash
# Prepares many document files under Slurm, with one task of a job array per list of files. Split the list of all files
# into lists, then run one task for each:
#
#   mkdir lists && find "$PWD/dolma" -name '*.json.gz' | sort | split --number=r/100 --numeric-suffixes --suffix-length=3 - lists/
#   sbatch --array=0-99 examples/prepare.sh lists data/dolma tokenizer.json
#
# Task 7 reads lists/007 and writes data/dolma-007.bin, .idx, .ledger.parquet and .manifest.json. Further arguments are
# options of `prepare`. A task that was killed resumes when it is started again. When all are done,
#
#   printf '%s\n' data/dolma-*.manifest.json | sed 's|.*/||; s|\.manifest\.json$||' > data/dolma.blend
#
# writes the list that data.train_data accepts as "@data/dolma.blend".
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
number=$(printf '%03d' "${SLURM_ARRAY_TASK_ID:?start it as a task of a job array}")
lists=$1 prefix=$2 tokenizer=$3
shift 3

exec "${PYTHON:-python3}" -m megatron_fanformer prepare "@$lists/$number" --output "$prefix-$number" \
    --tokenizer "$tokenizer" --workers "${SLURM_CPUS_PER_TASK:-1}" "$@"
