"""Entry point of a rank on one of several hosts."""

# Usage: `python -m dstrain.launch.multihost.rank_main FILE`.
#
# FILE is in the shared run folder and readable by its owner only. It holds the arguments of
# `dstrain`, which must not pass through a shell. The environment, which may contain secrets, is in
# no file: this host's agent hands it out.

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.files import get_host_id
from dstrain.launch.heartbeat import HEARTBEAT_ENV, fetch_environment
from dstrain.launch.processes import thread_environment
from dstrain.launch.worker import LAUNCH_FILE_ENV, SUPERVISOR_ENV
from dstrain.process_setup import count_available_cores


def main(launch_file: str) -> None:
    """Replace this process by `dstrain ARGUMENTS` with the launch environment."""
    launch = json.loads(Path(launch_file).read_text(encoding="utf-8"))
    here = launch["hosts"][get_host_id()]
    try:
        launch["environment"] = fetch_environment(here["heartbeat"], here["token"])
    except OSError as error:
        sys.exit(
            f"error: the agent of {here['hostname']} (pid {here['agent']}) does not hand out the environment ({error})"
        )
    os.chdir(launch["cwd"])
    command = [sys.executable, "-u", "-m", "dstrain.cli", *launch["arguments"]]
    # In place of this process: the launcher's signals and exit code stay those of the rank.
    os.execve(sys.executable, command, rank_environment(launch, here, os.environ, launch_file))


def rank_environment(
    launch: Mapping[str, Any], host: Mapping[str, Any], env: Mapping[str, str], launch_file: str
) -> dict[str, str]:
    """Return the launcher's environment, overridden by the launch's and by what is valid on this
    host only.
    """
    found = {
        name: value for name, value in env.items() if name != "PYTHONPATH"
    }  # DeepSpeed's runner adds its own folder to it
    found |= {
        **launch["environment"],
        LAUNCH_FILE_ENV: launch_file,
        SUPERVISOR_ENV: f"{host['hostname']} {host['agent']}",
    }
    found[HEARTBEAT_ENV] = f"{host['heartbeat']} {launch['heartbeat_timeout']:g}"
    if host["interface"]:
        found.setdefault("GLOO_SOCKET_IFNAME", host["interface"])
    if "OMPI_COMM_WORLD_RANK" in env:  # under pdsh DeepSpeed's launcher sets these
        found |= {"MASTER_ADDR": launch["master"][0], "MASTER_PORT": str(launch["master"][1])}
        if found.get("DS_ACCELERATOR") != "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host["slots"]))
    return thread_environment(found, len(host["slots"]), count_available_cores())


if __name__ == "__main__":
    main(sys.argv[1])
