#!/bin/sh
# Several machines over ssh, with DeepSpeed's own launcher (it needs pdsh and passwordless ssh):
#     launchers/hostfile.sh launchers/hostfile.example recipe.yaml --run-dir /shared/runs/one
# The project, its Python and the run folder must have the same path on every host.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 HOSTFILE RECIPE [options of dstrain train]" >&2
    exit 2
fi
# DeepSpeed would run on this machine alone, with a warning, where the hostfile does not exist.
if [ ! -f "$1" ]; then
    echo "$0: the hostfile $1 does not exist; see launchers/hostfile.example" >&2
    exit 2
fi
hostfile=$1
shift

# Without these a host that vanished keeps its ssh, and with it the launcher, forever.
PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} -o ServerAliveInterval=5 -o ServerAliveCountMax=2"
export PDSH_SSH_ARGS_APPEND

# --force_multi: a hostfile with one host in it means that host, not this machine.
# Of the environment only PYTHON*, NCCL* and the like reach the hosts; put the rest into .deepspeed_env,
# one NAME=value per line, without blank lines or comments.
exec deepspeed --hostfile "$hostfile" --force_multi --module dstrain.cli train "$@"
