"""Checks of all hosts before a launch, from their probes; choice of the master endpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.errors import Fault, UsageError
from dstrain.launch.multihost.agent_client import AgentClient, request
from dstrain.launch.multihost.plan import MasterEndpoint, MultiHostLaunch, format_cpu_overload
from dstrain.launch.multihost.versions import find_source_diff, hash_source_files, iter_version_diffs
from dstrain.launch.worker import get_workers_dir
from dstrain.process_setup import log_stderr


def probe_hosts(launch: MultiHostLaunch, clients: list[AgentClient], run_dir: Path) -> None:
    """Request every host's software, GPUs and addresses.

    Raises UsageError with the faults of all hosts.
    """
    # A new name each time: an NFS client may remember that an earlier one was absent.
    token = get_workers_dir(run_dir) / f"seen-{secrets.token_hex(8)}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_bytes(b"")
    try:
        answers = request(
            clients, lambda _: {"hello": {"token": str(token), "cwd": os.getcwd(), "cpu": launch.use_cpu}}, "facts"
        )
    finally:
        token.unlink(missing_ok=True)
    for client in clients:
        client.host_info = answers[client]
        client.use_heartbeat_timeout()
    if faults := list(_iter_host_faults(clients, run_dir)):
        raise UsageError(faults)
    if not any(client.host_info["gpus"] for client in clients):
        for client in clients:
            if line := format_cpu_overload(len(client.host.slots), client.host.name, client.host_info["cores"]):
                log_stderr(f"warning: {line}")


def _iter_host_faults(clients: list[AgentClient], run_dir: Path) -> Iterator[Fault]:
    first: dict[str, str] = {}
    with_gpus = any(client.host_info["gpus"] for client in clients)
    for client in clients:
        host, host_info, where = client.host, client.host_info, f"{client.host.location} {client.host.name}"
        # Two names of one machine would start two agents that kill each other's ranks.
        if (other := first.setdefault(host_info["machine"], host.name)) and other != host.name:
            yield Fault(where, f"is the same machine as {other}", "name it once, with all its slots")
        if not host_info["sees"]:
            yield Fault(
                where,
                f"does not see {run_dir}",
                "mount it there, or use a folder that all hosts share (--run-dir; TMPDIR for other commands than train)",
            )
        if not host_info["has_cwd"]:
            yield Fault(where, f"has no folder {Path.cwd()}", "start from a folder that all hosts have")
        yield from (Fault(where, problem, fix) for problem, fix in _iter_version_faults(host_info, clients[0]))
        if with_gpus and host_info["gpus"] <= max(host.slots):
            fix = "write as many slots as it has GPUs, or select with --include"
            yield Fault(where, f"has {host_info['gpus']} GPUs, but slot {max(host.slots)} is requested", fix)


def _iter_version_faults(host_info: Mapping[str, Any], first_client: AgentClient) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each version that differs.

    dstrain is compared with this process, whose messages the agents read; the rest with the first
    host, since the ranks compute together.
    """
    versions = host_info["versions"]
    if versions["dstrain"] != __version__:
        yield (
            f"has dstrain {versions['dstrain']}, this host has {__version__}",
            "install the same version on every host",
        )
    for name, wanted, found in iter_version_diffs(first_client.host_info["versions"], versions):
        if name != "dstrain":
            yield f"has {name} {found}, {first_client.host.name} has {wanted}", f"install {name} {wanted} on every host"
    name, count = find_source_diff(hash_source_files(), host_info["digests"])
    if count and versions["dstrain"] == __version__:
        others = f" and {count - 1} more" if count > 1 else ""
        yield (
            f"has other code of dstrain {__version__} than this host: {name}{others}",
            "install the same build on every host, or share the folder",
        )


def choose_master(launch: MultiHostLaunch, clients: list[AgentClient]) -> MasterEndpoint:
    """Choose address and port on the first host, and check that the others reach it.

    Raises UsageError.
    """
    first, others = clients[0], clients[1:]
    address = (
        launch.options.master_addr or first.host_info["reached_at"] or next(iter(first.host_info["addresses"]), "")
    )
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; give one with --master-addr")
    endpoint = {"address": address or "127.0.0.1", "port": launch.options.master_port or 0}
    opening = request([first], lambda _: {"open": endpoint}, "opened")[first]
    if "fault" in opening:
        raise UsageError(f"{first.host.name}: {opening['fault']}")
    first.interface = opening["interface"] if others else ""
    port = opening["port"]
    reached = request(others, lambda _: {"reach": {"address": address, "port": port}}, "reached")
    for client in others:
        client.interface = reached[client].get("interface", "")
    if faults := [
        Fault(
            f"{client.host.location} {client.host.name}",
            f"does not reach {first.host.name} at {address}, port {port} ({found['fault']})",
            "open the network between the hosts, or give an address that they reach with --master-addr",
        )
        for client, found in reached.items()
        if "fault" in found
    ]:
        raise UsageError(faults)
    return MasterEndpoint(address or "127.0.0.1", port)
