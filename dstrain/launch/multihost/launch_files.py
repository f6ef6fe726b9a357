"""Files of a multi-host launch in the run folder, for its ranks and DeepSpeed's runner."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain.launch.multihost.agent_client import AgentClient
from dstrain.launch.multihost.plan import MasterEndpoint, MultiHostLaunch


def write_launch_file(
    launch: MultiHostLaunch, file: Path, master: MasterEndpoint, clients: Sequence[AgentClient]
) -> None:
    """Write the file that every rank reads at its start; only its owner can read it.

    It does not hold the environment, which may contain secrets: the agents hand that out.
    """
    content = {
        "arguments": list(launch.arguments),
        "cwd": os.getcwd(),
        "silence": launch.heartbeat_timeout,
        "master": [master.address, master.port],
        "hosts": {client.host_info["machine"]: _host_entry(client) for client in clients},
    }
    # O_EXCL and 0600 from the start: it holds the token for the environment.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())  # other hosts read it over a network file system


def write_hostfile(launch: MultiHostLaunch, file: Path) -> None:
    """Write the hostfile for DeepSpeed's runner."""
    lines = (f"{host.name} slots={len(host.slots)}\n" for host in launch.hosts)
    if launch.options.launcher != "openmpi":  # DeepSpeed compares the slot numbers of --include with it
        lines = (f"{host.name} slots={max(host.slots) + 1}\n" for host in launch.hosts)
    file.write_text("".join(lines))


def _host_entry(client: AgentClient) -> dict[str, Any]:
    host_info = client.host_info
    return {
        "hostname": host_info["hostname"],
        "agent": host_info["pid"],
        "heartbeat": host_info["heartbeat"],
        "token": host_info["token"],
        "interface": client.interface,
        "slots": client.host.slots,
    }
