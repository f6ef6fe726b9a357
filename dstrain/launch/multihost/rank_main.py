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

from dstrain.launch.multihost.heartbeat import HEARTBEAT, environment_from
from dstrain.launch.multihost.probe import machine
from dstrain.launch.threads import cores_here, thread_environment
from dstrain.launch.worker import LAUNCH, SUPERVISOR


def main(path: str) -> None:
    """Become `dstrain ARGUMENTS` with the environment of the launch."""
    launch = json.loads(Path(path).read_text(encoding="utf-8"))
    here = launch["hosts"][machine()]
    try:
        launch["environment"] = environment_from(here["heartbeat"], here["token"])
    except OSError as error:
        sys.exit(
            f"error: the agent of {here['hostname']} (pid {here['agent']}) does not hand out the environment ({error})"
        )
    os.chdir(launch["cwd"])
    command = [sys.executable, "-u", "-m", "dstrain.cli", *launch["arguments"]]
    os.execve(sys.executable, command, rank_environment(launch, here, os.environ, path))


def rank_environment(
    launch: Mapping[str, Any], here: Mapping[str, Any], env: Mapping[str, str], path: str
) -> dict[str, str]:
    """The launcher's environment with the launch's upon it, and what only holds on this host."""
    found = {name: value for name, value in env.items() if name != "PYTHONPATH"}  # DeepSpeed's runner adds its folder
    found |= {**launch["environment"], LAUNCH: path, SUPERVISOR: f"{here['hostname']} {here['agent']}"}
    found[HEARTBEAT] = f"{here['heartbeat']} {launch['silence']:g}"
    if here["interface"]:
        found.setdefault("GLOO_SOCKET_IFNAME", here["interface"])
    if "OMPI_COMM_WORLD_RANK" in env:  # DeepSpeed's launcher does these under pdsh
        found |= {"MASTER_ADDR": launch["master"][0], "MASTER_PORT": str(launch["master"][1])}
        if found.get("DS_ACCELERATOR") != "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, here["slots"]))
    return thread_environment(found, len(here["slots"]), cores_here())


if __name__ == "__main__":
    main(sys.argv[1])
