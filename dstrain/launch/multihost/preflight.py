"""Before a launch on several hosts: each is asked what it has, and whether it reaches the place where the ranks meet."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.errors import Fault, UsageError
from dstrain.launch.multihost.agent_client import AgentClient, request
from dstrain.launch.multihost.plan import MasterEndpoint, MultiHostLaunch, format_cpu_overload
from dstrain.launch.multihost.versions import find_source_diff, hash_source_files, iter_version_diffs
from dstrain.launch.worker import get_workers_dir


def probe_hosts(launch: MultiHostLaunch, clients: list[AgentClient], run_dir: Path) -> None:
    """Ask every host for its facts. Raises UsageError for all that would keep a host from taking part."""
    token = get_workers_dir(run_dir) / f"seen-{secrets.token_hex(8)}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_bytes(b"")
    try:
        answers = request(
            clients, lambda _: {"hello": {"token": str(token), "cwd": os.getcwd(), "cpu": launch.use_cpu}}, "facts"
        )
    finally:
        token.unlink(missing_ok=True)
    for peer in clients:
        peer.host_info = answers[peer]
        peer.use_heartbeat_timeout()
    if faults := list(_iter_host_faults(clients, run_dir)):
        raise UsageError(faults)
    if not any(peer.host_info["gpus"] for peer in clients):
        for peer in clients:
            if line := format_cpu_overload(len(peer.host.slots), peer.host.name, peer.host_info["cores"]):
                print(f"warning: {line}", file=sys.stderr, flush=True)


def _iter_host_faults(clients: list[AgentClient], run_dir: Path) -> Iterator[Fault]:
    first: dict[str, str] = {}
    with_gpus = any(peer.host_info["gpus"] for peer in clients)
    for peer in clients:
        host, facts, where = peer.host, peer.host_info, f"{peer.host.location} {peer.host.name}"
        if (other := first.setdefault(facts["machine"], host.name)) and other != host.name:
            yield Fault(where, f"it is the same machine as {other}", "name it once, with all its slots")
        if not facts["sees"]:
            yield Fault(
                where,
                f"does not see {run_dir}",
                "mount it there, or take a folder that all hosts share (--run-dir; TMPDIR for other commands than train)",
            )
        if not facts["has_cwd"]:
            yield Fault(where, f"has no folder {Path.cwd()}", "start from a folder that all hosts have")
        yield from (Fault(where, problem, mend) for problem, mend in _iter_version_faults(facts, clients[0]))
        if with_gpus and facts["gpus"] <= max(host.slots):
            mend = "write as many slots as it has, or choose with --include"
            yield Fault(where, f"has {facts['gpus']} GPUs, and slot {max(host.slots)} is asked for", mend)


def _iter_version_faults(host_info: Mapping[str, Any], first_client: AgentClient) -> Iterator[tuple[str, str]]:
    """What differs: dstrain from this process, which the agents talk with; the rest from the first host, as ranks compute together."""
    theirs = host_info["versions"]
    if theirs["dstrain"] != __version__:
        yield f"has dstrain {theirs['dstrain']}, this host has {__version__}", "install the same version on every host"
    for name, wanted, found in iter_version_diffs(first_client.host_info["versions"], theirs):
        if name != "dstrain":
            yield f"has {name} {found}, {first_client.host.name} has {wanted}", f"install {name} {wanted} on every host"
    name, count = find_source_diff(hash_source_files(), host_info["digests"])
    if count and theirs["dstrain"] == __version__:
        others = f" and {count - 1} more" if count > 1 else ""
        yield (
            f"has other code of dstrain {__version__} than this host: {name}{others}",
            "install the same build on every host, or share the folder",
        )


def choose_master(launch: MultiHostLaunch, clients: list[AgentClient]) -> MasterEndpoint:
    """Choose where the ranks meet, on the first host, and see that the others reach it. Raises UsageError."""
    first, others = clients[0], clients[1:]
    address = (
        launch.options.master_addr or first.host_info["reached_at"] or next(iter(first.host_info["addresses"]), "")
    )
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; say one with --master-addr")
    asked = {"address": address or "127.0.0.1", "port": launch.options.master_port or 0}
    opening = request([first], lambda _: {"open": asked}, "opened")[first]
    if "fault" in opening:
        raise UsageError(f"{first.host.name}: {opening['fault']}")
    first.interface = opening["interface"] if others else ""
    port = opening["port"]
    reached = request(others, lambda _: {"reach": {"address": address, "port": port}}, "reached")
    for peer in others:
        peer.interface = reached[peer].get("interface", "")
    if faults := [
        Fault(
            f"{peer.host.location} {peer.host.name}",
            f"does not reach {first.host.name} at {address}, port {port} ({found['fault']})",
            "open the network between the hosts, or say with --master-addr which of its addresses they reach",
        )
        for peer, found in reached.items()
        if "fault" in found
    ]:
        raise UsageError(faults)
    return MasterEndpoint(address or "127.0.0.1", port)
