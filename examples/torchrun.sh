#!/usr/bin/env bash
# Trains under torchrun, one rank per GPU, on one node or on several. The arguments are those of `train`.
#
#   examples/torchrun.sh --config examples/fanformer-300m.yaml
#
# On several nodes, start it on each, with the same arguments and that node's number:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node-0 examples/torchrun.sh --config examples/fanformer-300m.yaml
#
# Variables, with their defaults:
#   NNODES (1), NODE_RANK (0)                  how many nodes, and which of them this is
#   MASTER_ADDR (localhost), MASTER_PORT (29500)  where the nodes meet: node 0, and a free port there
#   GPUS_PER_NODE (8)                          ranks per node (4 with GB200); NPROC_PER_NODE is another name for it
#   MAX_RESTARTS (0)                           how often torchrun starts its ranks again after a failure
#   PYTHON (python3)                           the interpreter that has megatron_fanformer
#
# A signal to stop (SIGTERM, SIGINT, SIGUSR1) saves a checkpoint first; the same command then resumes from there.
set -euo pipefail

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds for that checkpoint; an older torch ignores this and gives 30

exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${NPROC_PER_NODE:-${GPUS_PER_NODE:-8}}" \
    --master-addr "${MASTER_ADDR:-localhost}" \
    --master-port "${MASTER_PORT:-29500}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
    --module megatron_fanformer train "$@"
