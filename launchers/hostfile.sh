#!/bin/sh
# dstrain on several hosts over ssh:
#     launchers/hostfile.sh launchers/hostfile.example recipe.yaml --run-dir /shared/runs/one
# The same as `dstrain train recipe.yaml --hostfile FILE ...`: dstrain checks the hosts before anything starts, forwards the
# environment and signals, and leaves no process behind on any of them.
#
# Plain `deepspeed --hostfile FILE --module dstrain.cli train recipe.yaml` works too, but leaves all of this to DeepSpeed
# (0.19.8, over pdsh; each was observed):
# - if FILE does not exist, it runs on this machine; so it does if --include leaves a single host, whichever that is;
# - it forwards only PYTHON*, MLFLOW*, MV2*, UCX*, on GPUs NCCL*, and what ~/.deepspeed_env or ./.deepspeed_env lists, in
#   which a comment or a blank line ends the launch with an error;
# - it waits for an unreachable host until the start of the others times out; a host that is lost later makes it wait
#   without end, unless PDSH_SSH_ARGS_APPEND="-o ServerAliveInterval=5 -o ServerAliveCountMax=2" is set;
# - after a closed terminal, or SIGKILL of the launcher, the ranks continue; a killed pdsh counts as success;
# - SIGTERM also kills your other jobs of the same kind on these hosts.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 HOSTFILE RECIPE [options of dstrain train]" >&2
    exit 2
fi
hostfile=$1 recipe=$2
shift 2
exec dstrain train "$recipe" --hostfile "$hostfile" "$@"
