#!/usr/bin/env bash
# Trains on several nodes under Slurm: `srun` starts one rank per GPU, and the ranks join by Slurm's own variables.
# The arguments are those of `train`:
#
#   sbatch --nodes=8 examples/slurm.sh --config examples/fanformer-1b.yaml
#
# Adapt the lines below to the cluster, and load its modules or activate the environment before sbatch.
#
#SBATCH --job-name=fanformer
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#
# Three minutes before the time limit the ranks get a signal: they save a checkpoint, and end with exit code 5.
#SBATCH --signal=USR1@180
#SBATCH --requeue
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes[0]}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_ADDR MASTER_PORT

# Ranks that stop after saving end seconds apart, which --wait allows. After a failure it ends the remaining ones.
code=0
srun --kill-on-bad-exit=0 --wait=30 "${PYTHON:-python3}" -m megatron_fanformer train "$@" || code=$?

# Stopped after saving: the requeued job resumes from there. Without this line, submit it again by hand.
if [[ $code -eq 5 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
