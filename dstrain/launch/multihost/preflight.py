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
from dstrain.launch.multihost.agent_client import Peer, ask
from dstrain.launch.multihost.plan import HostsLaunch, Master, more_than_cores
from dstrain.launch.versions import digests, first_unlike, unlike
from dstrain.launch.worker import record_folder


def learn(launch: HostsLaunch, peers: list[Peer], run_dir: Path) -> None:
    """Ask every host for its facts. Raises UsageError for all that would keep a host from taking part."""
    token = record_folder(run_dir) / f"seen-{secrets.token_hex(8)}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_bytes(b"")
    try:
        answers = ask(peers, lambda _: {"hello": {"token": str(token), "cwd": os.getcwd(), "cpu": launch.cpu}}, "facts")
    finally:
        token.unlink(missing_ok=True)
    for peer in peers:
        peer.facts = answers[peer]
        peer.patient_no_more()
    if faults := list(_faults(peers, run_dir)):
        raise UsageError(faults)
    if not any(peer.facts["gpus"] for peer in peers):
        for peer in peers:
            if line := more_than_cores(len(peer.host.slots), peer.host.name, peer.facts["cores"]):
                print(f"warning: {line}", file=sys.stderr, flush=True)


def _faults(peers: list[Peer], run_dir: Path) -> Iterator[Fault]:
    first: dict[str, str] = {}
    with_gpus = any(peer.facts["gpus"] for peer in peers)
    for peer in peers:
        host, facts, where = peer.host, peer.facts, f"{peer.host.where} {peer.host.name}"
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
        yield from (Fault(where, problem, mend) for problem, mend in _other_software(facts, peers[0]))
        if with_gpus and facts["gpus"] <= max(host.slots):
            mend = "write as many slots as it has, or choose with --include"
            yield Fault(where, f"has {facts['gpus']} GPUs, and slot {max(host.slots)} is asked for", mend)


def _other_software(facts: Mapping[str, Any], first: Peer) -> Iterator[tuple[str, str]]:
    """What differs: dstrain from this process, which the agents talk with; the rest from the first host, as ranks compute together."""
    theirs = facts["versions"]
    if theirs["dstrain"] != __version__:
        yield f"has dstrain {theirs['dstrain']}, this host has {__version__}", "install the same version on every host"
    for name, wanted, found in unlike(first.facts["versions"], theirs):
        if name != "dstrain":
            yield f"has {name} {found}, {first.host.name} has {wanted}", f"install {name} {wanted} on every host"
    name, count = first_unlike(digests(), facts["digests"])
    if count and theirs["dstrain"] == __version__:
        others = f" and {count - 1} more" if count > 1 else ""
        yield (
            f"has other code of dstrain {__version__} than this host: {name}{others}",
            "install the same build on every host, or share the folder",
        )


def meet(launch: HostsLaunch, peers: list[Peer]) -> Master:
    """Choose where the ranks meet, on the first host, and see that the others reach it. Raises UsageError."""
    first, others = peers[0], peers[1:]
    address = launch.options.master_addr or first.facts["reached_at"] or next(iter(first.facts["addresses"]), "")
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; say one with --master-addr")
    asked = {"address": address or "127.0.0.1", "port": launch.options.master_port or 0}
    opening = ask([first], lambda _: {"open": asked}, "opened")[first]
    if "fault" in opening:
        raise UsageError(f"{first.host.name}: {opening['fault']}")
    first.interface = opening["interface"] if others else ""
    port = opening["port"]
    reached = ask(others, lambda _: {"reach": {"address": address, "port": port}}, "reached")
    for peer in others:
        peer.interface = reached[peer].get("interface", "")
    if faults := [
        Fault(
            f"{peer.host.where} {peer.host.name}",
            f"does not reach {first.host.name} at {address}, port {port} ({found['fault']})",
            "open the network between the hosts, or say with --master-addr which of its addresses they reach",
        )
        for peer, found in reached.items()
        if "fault" in found
    ]:
        raise UsageError(faults)
    return Master(address or "127.0.0.1", port)
