#!/bin/sh
# dstrain under torchrun, on one machine:
#     launchers/torchrun.sh demo-rm --run-dir runs/one
#     GPUS=4 launchers/torchrun.sh demo-rm        (on a CPU, GPUS is the number of processes)
# On several machines, the same command on each, with the run folder shared:
#     NODES=2 NODE_RANK=0 MASTER_ADDR=host1 launchers/torchrun.sh recipe.yaml
#     NODES=2 NODE_RANK=1 MASTER_ADDR=host1 launchers/torchrun.sh recipe.yaml
# RESTARTS=3 on each restarts all ranks, up to 3 times, after one of them has died; they resume from the last checkpoint.
# GRACE=300: seconds that ranks have for their checkpoint when torchrun is asked to stop; default 30.
# The exit code is torchrun's: 0, or 1 for any other exit code of the ranks (also 2 and 75).
set -eu
PYTHON=${PYTHON:-python} NODES=${NODES:-1} RESTARTS=${RESTARTS:-0}

if [ "$NODES" != 1 ] && { [ -z "${MASTER_ADDR:-}" ] || { [ -z "${NODE_RANK:-}" ] && [ "$RESTARTS" = 0 ]; }; }; then
    echo "$0: NODES=$NODES needs MASTER_ADDR, the first machine's address, and NODE_RANK, this one's index from 0" >&2
    exit 2
fi
if [ -z "${GPUS:-}" ]; then
    GPUS=$("$PYTHON" -c 'import os; from dstrain.launch.topology import visible_gpus; print(visible_gpus(os.environ) or 1)')
fi
# A free port only on one machine: several machines must agree on it, so they use a fixed one.
if [ -z "${MASTER_PORT:-}" ]; then
    if [ "$NODES" = 1 ]; then
        MASTER_PORT=$("$PYTHON" -c 'from dstrain.launch.probe import free_port; print(free_port())')
    else
        MASTER_PORT=29500
    fi
fi
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}

if [ -n "${GRACE:-}" ]; then
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$GRACE"
    set -- --set "launch.grace_seconds=$GRACE" "$@"
fi
if [ "$RESTARTS" = 0 ]; then
    set -- --node-rank "${NODE_RANK:-0}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m dstrain.cli train "$@"
else
    # With torch 2.13's default, restarted ranks read the gloo addresses of the ranks before them.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # The rendezvous is on one of the machines; set LOCAL_ADDR if the others cannot resolve this one's name.
    if [ "$NODES" = 1 ]; then LOCAL_ADDR=127.0.0.1; fi
    set -- --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id dstrain --max-restarts "$RESTARTS" \
        ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} -m dstrain.cli train "$@"
fi
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" "$@"
