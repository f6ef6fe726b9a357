#!/bin/sh
# Several machines over ssh:
#     launchers/hostfile.sh launchers/hostfile.example recipe.yaml --run-dir /shared/runs/one
# The same as `dstrain train recipe.yaml --hostfile FILE ...`: dstrain checks the hosts before anything starts, passes the
# environment and the signals on, and leaves no process behind on any of them.
#
# Plain `deepspeed --hostfile FILE --module dstrain.cli train recipe.yaml` works too, and leaves all of this to DeepSpeed
# (0.19.8, over pdsh; each was seen):
# - a FILE that does not exist means this machine alone; so does one host that is left over by --include, whichever it is;
# - of the environment PYTHON*, MLFLOW*, MV2*, UCX* travel, NCCL* on GPUs, and what ~/.deepspeed_env or ./.deepspeed_env lists,
#   in which a comment or a blank line ends the launch with an error;
# - a host that cannot be reached is waited for until the others' start times out; one that vanishes later keeps the launcher
#   waiting forever, unless PDSH_SSH_ARGS_APPEND="-o ServerAliveInterval=5 -o ServerAliveCountMax=2" is set;
# - a terminal that closes, or a SIGKILL of the launcher, leaves the ranks training; a killed pdsh counts as success;
# - SIGTERM ends your other jobs of the same kind on these hosts as well.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 HOSTFILE RECIPE [options of dstrain train]" >&2
    exit 2
fi
hostfile=$1 recipe=$2
shift 2
exec dstrain train "$recipe" --hostfile "$hostfile" "$@"
