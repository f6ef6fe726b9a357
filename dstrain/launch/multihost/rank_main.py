"""The beginning of a rank on one of several hosts: `python -m dstrain.launch.multihost.rank_main FILE`.

FILE, in the run folder that all hosts share and readable by its owner alone, holds what must not go through a shell:
the arguments of `dstrain`. The environment, secrets included, lies in no file: the agent of this host hands it out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.launch.heartbeat import HEARTBEAT_ENV, fetch_environment
from dstrain.launch.processes import get_host_id
from dstrain.launch.threads import count_available_cores, thread_environment
from dstrain.launch.worker import LAUNCH_FILE_ENV, SUPERVISOR_ENV


def main(launch_file: str) -> None:
    """Become `dstrain ARGUMENTS` with the environment of the launch."""
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
    os.execve(sys.executable, command, rank_environment(launch, here, os.environ, launch_file))


def rank_environment(
    launch: Mapping[str, Any], host: Mapping[str, Any], env: Mapping[str, str], launch_file: str
) -> dict[str, str]:
    """The launcher's environment with the launch's upon it, and what only holds on this host."""
    found = {name: value for name, value in env.items() if name != "PYTHONPATH"}  # DeepSpeed's runner adds its folder
    found |= {
        **launch["environment"],
        LAUNCH_FILE_ENV: launch_file,
        SUPERVISOR_ENV: f"{host['hostname']} {host['agent']}",
    }
    found[HEARTBEAT_ENV] = f"{host['heartbeat']} {launch['silence']:g}"
    if host["interface"]:
        found.setdefault("GLOO_SOCKET_IFNAME", host["interface"])
    if "OMPI_COMM_WORLD_RANK" in env:  # DeepSpeed's launcher does these under pdsh
        found |= {"MASTER_ADDR": launch["master"][0], "MASTER_PORT": str(launch["master"][1])}
        if found.get("DS_ACCELERATOR") != "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host["slots"]))
    return thread_environment(found, len(host["slots"]), count_available_cores())


if __name__ == "__main__":
    main(sys.argv[1])
