#!/bin/sh
# One machine under torchrun:
#     launchers/torchrun.sh demo-rm --run-dir runs/one
#     GPUS=4 launchers/torchrun.sh demo-rm        (on a CPU GPUS counts processes)
# Several machines: the same command on each, with the run folder shared:
#     NODES=2 NODE_RANK=0 MASTER_ADDR=host1 launchers/torchrun.sh recipe.yaml
#     NODES=2 NODE_RANK=1 MASTER_ADDR=host1 launchers/torchrun.sh recipe.yaml
set -eu
PYTHON=${PYTHON:-python}

if [ -z "${GPUS:-}" ]; then
    GPUS=$("$PYTHON" -c 'import os; from dstrain.launch.topology import visible_gpus; print(visible_gpus(os.environ) or 1)')
fi
# Asked for a free port only here: all machines must agree on it, so several take a fixed one.
if [ -z "${MASTER_PORT:-}" ]; then
    if [ "${NODES:-1}" = 1 ]; then
        MASTER_PORT=$("$PYTHON" -c 'from dstrain.launch.command import free_port; print(free_port())')
    else
        MASTER_PORT=29500
    fi
fi

exec "$PYTHON" -m torch.distributed.run \
    --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$GPUS" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT" \
    -m dstrain.cli train "$@"
