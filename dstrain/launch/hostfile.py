"""Hostfile parsing, and host selection (--include, --exclude, --num-nodes, --num-gpus)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import Fault, UsageError, suggest_name
from dstrain.files import not_file_reason


@dataclass(frozen=True)
class Host:
    """Host of a launch and its slots."""

    name: str
    """Name in the hostfile, as ssh takes it."""
    slots: tuple[int, ...]
    """GPU numbers, one process each; on a CPU only numbers."""
    location: str = ""
    """Its line, for error messages: hostfile:3."""


def read_hostfile(path: str) -> list[Host]:
    """Read the hosts of a file. Raises UsageError with line numbers."""
    try:
        file = Path(path).expanduser()
        if special := not_file_reason(file):
            raise UsageError(f"--hostfile {path}: {special}; save it as a file")
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise UsageError(
            f"--hostfile {path}: cannot be read ({reason}); write one line per host, like host1 slots=8"
        ) from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Parse `host slots=8` lines, in their order; blank lines and comments are skipped."""
    hosts: dict[str, Host] = {}
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words, where = line.split("#", 1)[0].split(), f"{source}:{number}"
        if not words:
            continue
        # OpenMPI's hostfiles may have max_slots after it.
        match = re.fullmatch(r"slots=([1-9]\d{0,3})( max[-_]slots=\d+)?", " ".join(words[1:]))
        if match is None:
            faults.append(Fault(where, f"'{line.strip()}' is not a host line", "write it like host1 slots=8"))
        elif not re.fullmatch(r"[\w@.:%-]+", words[0]) or words[0].startswith("-"):
            faults.append(Fault(where, f"'{words[0]}' is not a host name", "write it as ssh takes it"))
        elif words[0] in hosts:
            first = hosts[words[0]].location
            faults.append(Fault(where, f"{words[0]} is named twice ({first})", "give it one line with all its slots"))
        else:
            hosts[words[0]] = Host(words[0], tuple(range(int(match[1]))), where)
    if not hosts and not faults:
        faults.append(Fault(source, "names no host", "write one line per host, like host1 slots=8"))
    if faults:
        raise UsageError(faults)
    return list(hosts.values())


def select_hosts(
    hosts: list[Host], include: str, exclude: str, num_nodes: int | None, num_gpus: int | None
) -> list[Host]:
    """Return the hosts and slots that the options select, in the file's order. Raises UsageError."""
    if include and exclude:
        raise UsageError("--include and --exclude are both set; give only one of them")
    if (include or exclude) and (num_nodes is not None or num_gpus is not None):
        raise UsageError(
            "--num-nodes and --num-gpus cannot be combined with --include or --exclude, which select hosts and GPUs; "
            "give one or the other"
        )
    if include or exclude:
        option, text = ("--include", include) if include else ("--exclude", exclude)
        named = _parse_slots(option, text, {host.name: host for host in hosts})
        left = [_filter_slots(host, named.get(host.name, ()), bool(include)) for host in hosts]
        if not any(host.slots for host in left):
            raise UsageError(f"{option} '{text}' leaves no slot to run on; leave at least one")
        return [host for host in left if host.slots]
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise UsageError(f"--num-nodes {num_nodes}: the hostfile names {len(hosts)} hosts; give 1 to {len(hosts)}")
    chosen = hosts[:num_nodes]
    for host in chosen:
        if num_gpus is not None and not 1 <= num_gpus <= len(host.slots):
            raise UsageError(
                f"--num-gpus {num_gpus}: {host.name} has {len(host.slots)} slots ({host.location}); "
                f"ask for 1 to {len(host.slots)}, or raise its slots there"
            )
    return [Host(host.name, host.slots[:num_gpus], host.location) for host in chosen]


def _filter_slots(host: Host, slots: Collection[int], keep: bool) -> Host:
    return Host(host.name, tuple(slot for slot in host.slots if (slot in slots) == keep), host.location)


def _parse_slots(option: str, value: str, hosts: Mapping[str, Host]) -> dict[str, set[int]]:
    """Parse DeepSpeed's NAME[:SLOT,...][@NAME...] to slots by host; all slots of a host without any."""
    found: dict[str, set[int]] = {}
    for part in value.split("@"):
        name, _, numbers = part.partition(":")
        if name not in hosts:
            raise UsageError(f"{option} '{value}': {name} is not in the hostfile; {suggest_name(name, list(hosts))}")
        if numbers and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", numbers):
            raise UsageError(f"{option} '{value}': '{numbers}' is not a list of slots; write it like host1@host2:0,2")
        slots = {int(number) for number in numbers.split(",")} if numbers else set(hosts[name].slots)
        if absent := slots - set(hosts[name].slots):
            raise UsageError(
                f"{option} '{value}': {name} has no slot {min(absent)}; {hosts[name].location} gives it "
                f"0 to {len(hosts[name].slots) - 1}"
            )
        found.setdefault(name, set()).update(slots)
    return found
