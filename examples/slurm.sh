#!/usr/bin/env bash
# Trains on several nodes under Slurm: `srun` starts one rank per GPU, and the ranks join by Slurm's own variables.
# The arguments are those of `train`:
#
#   sbatch --nodes=8 examples/slurm.sh --config examples/fanformer-1b.yaml
#
# With spare nodes, NODES says how many ranks are to run on; a lost node is then left out, and the run goes on without
# waiting in the queue:
#
#   NODES=8 sbatch --nodes=10 examples/slurm.sh --config examples/fanformer-1b.yaml
#
# In a container, where the cluster has Pyxis and Enroot:
#
#   CONTAINER_IMAGE=$PWD/megatron-fanformer.sqsh sbatch --nodes=8 examples/slurm.sh --config examples/fanformer-1b.yaml
#
# Variables, with their defaults:
#   NODES (all of the job)   how many nodes to train on
#   GPUS_PER_NODE (--ntasks-per-node)   ranks on each: with GB200 four, by sbatch --gpus-per-node=4 --ntasks-per-node=4
#   INTERFACE (none)         the network interface that the ranks meet by, such as ib0; else the nodes' names lead there
#   CHECK (0)                1: run examples/check_nodes.py on all nodes first, and end if it marks one
#   MAX_RESTARTS (3)         how often the ranks are started again in this job, after a failure
#   PYTHON (python3)         the interpreter that has megatron_fanformer
#   CONTAINER_IMAGE (none), CONTAINER_MOUNTS (this folder)   a container for the ranks: an image as Enroot
#                            names it, or a .sqsh file, and its mounts, FROM:TO,…
#
# Adapt the lines below to the cluster, and load its modules or activate the environment before sbatch. All of a node's
# memory and cores are the job's.
#
#SBATCH --job-name=fanformer
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#
# Three minutes before the time limit the ranks get a signal: they save a checkpoint, and end with exit code 5.
#SBATCH --signal=USR1@180
#SBATCH --requeue
# A lost node ends the ranks, and not the job: see below.
#SBATCH --no-kill
set -euo pipefail

python=${PYTHON:-python3}
wanted=${NODES:-$SLURM_JOB_NUM_NODES}
if ((wanted > SLURM_JOB_NUM_NODES)); then
    echo "NODES is $wanted, and the job has $SLURM_JOB_NUM_NODES nodes; ask for as many: sbatch --nodes=$wanted" >&2
    exit 2
fi
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_PORT
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi # else all cores
tasks_per_node=${GPUS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-1}}
container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD" --no-container-entrypoint
        --container-mounts="${CONTAINER_MOUNTS:-$PWD:$PWD}")
fi
if [[ -n ${INTERFACE:-} ]]; then export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE; fi
STOPPED=5                 # the exit code of ranks that a signal stopped
SIGNALLED=$((128 + 10))   # that of a check which SIGUSR1 ended
LOST_NODE_SECONDS=15      # until nodes that do not all answer are tried again: Slurm takes minutes to notice a lost one
LOST_NODE_TRIES=40
LEAST_SECONDS=240         # of the job, for a step to be started: Slurm signals the steps that are there, and no later one
if [[ -n ${SLURM_JOB_START_TIME:-} ]] && ((SLURM_JOB_END_TIME - SLURM_JOB_START_TIME <= LEAST_SECONDS)); then
    echo "the job has $((SLURM_JOB_END_TIME - SLURM_JOB_START_TIME)) s, and its ranks need more than $LEAST_SECONDS s; set --time" >&2
    exit 2 # else it would be requeued for ever
fi

# Ranks are born with their signals held, until Python listens (coreutils before 8.31 cannot do it).
hold=(env "--block-signal=TERM,INT,HUP,USR1,USR2")
"${hold[@]}" true 2> /dev/null || hold=()

# address_of NODE: where the ranks meet on it, its name or the address of its INTERFACE.
address_of() {
    if [[ -z ${INTERFACE:-} ]]; then
        echo "$1"
        return
    fi
    local listed show=(ip -oneline -4 address show dev "$INTERFACE" scope global)
    listed=$(srun --nodes=1 --nodelist="$1" --ntasks=1 "${show[@]}") || return
    if [[ ! $listed =~ inet\ ([0-9.]+) ]]; then
        echo "$1 has no IPv4 address on INTERFACE $INTERFACE; name another" >&2
        return 2
    fi
    echo "${BASH_REMATCH[1]}"
}

# on WAIT NODE… -- COMMAND…: run it on nodes, of which the first is where the processes meet. After the
# first has ended, the others have WAIT seconds: those that stop after saving end seconds apart.
# Where the time limit's signal may have come already, the job is requeued instead.
on() {
    local wait=$1 nodes=()
    shift
    while [[ $1 != -- ]]; do nodes+=("$1"); shift; done
    shift
    if [[ -n ${SLURM_JOB_END_TIME:-} ]] && ((SLURM_JOB_END_TIME - $(date +%s) < LEAST_SECONDS)); then requeue; fi
    MASTER_ADDR=$(address_of "${nodes[0]}") || return
    export MASTER_ADDR
    # Slurm would bind tasks to cores of its own choice, and not to those near their GPUs.
    srun --cpu-bind=none "${container[@]}" --nodes="${#nodes[@]}" --nodelist="$(IFS=,; echo "${nodes[*]}")" \
        --ntasks="$((tasks_per_node * ${#nodes[@]}))" --ntasks-per-node="$tasks_per_node" --kill-on-bad-exit=0 --wait="$wait" "$@"
}

# The job goes back to the queue, and is resumed from its checkpoint. Without this, submit it again by hand.
requeue() {
    scontrol requeue "$SLURM_JOB_ID"
    exit "$STOPPED"
}

# The nodes that Slurm still gives this job, in `nodes`, once as many as are wanted answer.
find_nodes() {
    local listed
    for ((try = 1; try <= LOST_NODE_TRIES; try++)); do
        if listed=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && [[ -n $listed ]]; then
            mapfile -t nodes < <(scontrol show hostnames "$listed")
            if ((${#nodes[@]} < wanted)); then requeue; fi
            if timeout 60 srun --nodes="$wanted" --nodelist="$(IFS=,; echo "${nodes[*]:0:wanted}")" \
                --ntasks="$wanted" --ntasks-per-node=1 true; then return; fi
        fi
        sleep "$LOST_NODE_SECONDS"
    done
    echo "the nodes do not answer; see what srun says" >&2
    exit 1
}

if [[ ${CHECK:-0} == 1 ]]; then
    find_nodes
    code=0
    on 100 "${nodes[@]}" -- "$python" examples/check_nodes.py || code=$?
    if [[ $code -eq $SIGNALLED ]]; then requeue; fi
    if [[ $code -ne 0 ]]; then exit "$code"; fi
fi
for ((start = 0; start <= ${MAX_RESTARTS:-3}; start++)); do
    find_nodes
    code=0
    # Rank 0 may need more than a minute to write its logs.
    on 100 "${nodes[@]:0:wanted}" -- \
        "${hold[@]}" "$python" -m megatron_fanformer train "$@" || code=$?
    case $code in
        "$STOPPED") requeue ;;
        0 | 2 | 3 | 4) exit "$code" ;; # done, or starting again would not help
    esac
done
exit "$code"
