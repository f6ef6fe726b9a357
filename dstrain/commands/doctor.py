"""dstrain doctor: what would stop a run, on this host or on those of a hostfile, each with its fix."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrain.commands.environment import EnvironmentLine, collect_host_lines, nearest_folder
from dstrain.commands.run_job import Job, Prepared, run_job
from dstrain.config import RunConfig
from dstrain.errors import DstrainError, Fault
from dstrain.launch.hostfile import Host, read_hostfile
from dstrain.launch.hosts import HostSession, ask, iter_host_faults, open_sessions, request_host_info
from dstrain.launch.probe import open_port, try_connect
from dstrain.launch.topology import is_cpu_requested, visible_gpus
from dstrain.process_setup import log_stderr
from dstrain.units import format_bytes

if TYPE_CHECKING:
    from dstrain.distributed.world import World

State = Literal["ok", "warning", "fault"]
HOST_TIMEOUT_SECONDS = 30.0
"""A host whose network does not answer for this long is lost."""
MAX_CLOCK_SECONDS = 60.0
"""Largest difference of the clocks of two hosts without a warning."""
ALL_REDUCE_BYTES, ALL_REDUCE_ROUNDS = 64 << 20, 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check on one host."""

    host: str
    check: str
    state: State
    value: str = ""
    """What was found."""
    problem: str = ""
    """Problem and fix; empty where all is well."""


def run_doctor(hostfile: str | None, run_dir: Path) -> list[Finding]:
    """Check this host, or all hosts of a hostfile at the same time. Raises UsageError for the hostfile."""
    if hostfile is None:
        name = socket.gethostname()
        findings = _judge_lines(name, collect_host_lines(run_dir, several_hosts=False))
        processes = visible_gpus(os.environ)
    else:
        hosts = read_hostfile(hostfile)
        with _shared_folder(run_dir) as folder:
            try:
                folder.mkdir()  # the hosts look for a file there
            except OSError as error:
                problem = (
                    f"{run_dir} cannot be written here ({error.strerror}); give another --run-dir, or the permission"
                )
                return [Finding(host=socket.gethostname(), check="run folder", state="fault", problem=problem)]
            findings = check_hosts(hosts, run_dir, folder)
        processes = sum(len(host.slots) for host in hosts)
    if processes < 2:
        return findings
    if faults := sum(finding.state == "fault" for finding in findings):
        skipped = Finding(host="all", check="all-reduce", state="ok", value=f"not tried: {faults} faults above")
        return [*findings, skipped]
    return [*findings, check_all_reduce(hostfile, run_dir)]


def check_hosts(hosts: Sequence[Host], run_dir: Path, folder: Path) -> list[Finding]:
    """Check the hosts of a hostfile: each by itself, and each with the others. `folder` is one that they should share."""
    findings: list[Finding] = []

    with (
        tempfile.TemporaryDirectory(prefix="dstrain-doctor-") as logs,
        open_sessions(hosts, Path(logs), HOST_TIMEOUT_SECONDS) as sessions,
    ):
        request_host_info(sessions, folder, is_cpu_requested(os.environ))
        for session in sessions:
            name = session.host.name
            if session.info:
                findings.append(Finding(host=name, check="ssh", state="ok", value="answers without a prompt"))
            else:
                findings.append(_make_finding("ssh", session.connection_fault(), name))
        answering = [session for session in sessions if session.info]
        by_place = {f"{session.host.location} {session.host.name}": session.host.name for session in answering}
        if answering:
            faults = iter_host_faults(answering, run_dir)
            findings += [_make_finding(check, fault, by_place[fault.where]) for check, fault in faults]
            findings += _check_clocks(answering)
            findings += _check_network(answering)
            # Its own last, and long: another process imports torch.
            replies = ask(answering, describe_environment, run_dir=str(run_dir))
            for session in answering:
                lines = [EnvironmentLine(**line) for line in replies.get(session, [])]
                findings += _judge_lines(session.host.name, lines)
                if not lines:
                    findings.append(_make_finding("ssh", session.connection_fault(), session.host.name))
    order = [host.name for host in hosts]
    return sorted(findings, key=lambda finding: order.index(finding.host))


def describe_environment(run_dir: str) -> list[dict[str, Any]]:
    """Return the lines on this host's environment. Called on each host."""
    return [asdict(line) for line in collect_host_lines(Path(run_dir), several_hosts=True)]


def _make_finding(check: str, fault: Fault, host: str) -> Finding:
    return Finding(host=host, check=check, state="fault", problem=f"{fault.problem}; {fault.fix}")


def _judge_lines(host: str, lines: Sequence[EnvironmentLine]) -> list[Finding]:
    def judge(line: EnvironmentLine) -> State:
        return "fault" if line.is_fault else "warning" if line.warning else "ok"

    return [
        Finding(host=host, check=line.name, state=judge(line), value=line.value, problem=line.warning) for line in lines
    ]


def _check_clocks(sessions: Sequence[HostSession]) -> Iterator[Finding]:
    """Compare the hosts' clocks with this host's."""
    asked_at = time.time()
    for session, theirs in ask(sessions, time.time).items():
        # Between the request and now.
        ahead = theirs - min(max(theirs, asked_at), time.time())
        problem = ""
        if abs(ahead) > MAX_CLOCK_SECONDS:
            problem = (
                f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's: logs and metrics show "
                "wrong times, and Slurm and TLS may refuse it; start a time service there (chrony, systemd-timesyncd)"
            )
        state: State = "warning" if problem else "ok"
        yield Finding(host=session.host.name, check="clock", state=state, value=f"{ahead:+.0f} s", problem=problem)


def _check_network(sessions: Sequence[HostSession]) -> Iterator[Finding]:
    """Connect from every host to a free port of the first one, and from the first one to every other."""
    first, others = sessions[0], sessions[1:]
    if not others:
        return
    ports: dict[HostSession, int] = {}
    addresses = {
        session: session.info["reached_at"] or next(iter(session.info["addresses"]), "") for session in sessions
    }
    for session, address in addresses.items():
        opened = ask([session], open_port, address=address, port=0).get(session, {})
        ports[session] = opened.get("port", 0)
    ways = [(other, first) for other in others] + [(first, other) for other in others]
    for source, target in ways:
        # One after another: a host answers one request at a time.
        place = {"address": addresses[target], "port": ports[target]}
        reply = ask([source], try_connect, **place).get(source, {})
        fault = reply.get("fault", "" if reply else "no answer")
        value = (
            f"reaches {target.host.name} at {place['address']} over {reply.get('interface') or 'an unknown interface'}"
        )
        if fault:
            problem = f"does not reach {target.host.name} at {place['address']}, port {place['port']} ({fault})"
            fix = "open all ports between the hosts in their firewalls: ranks connect to each other at any of them"
            yield Finding(host=source.host.name, check="network", state="fault", problem=f"{problem}; {fix}")
        else:
            yield Finding(host=source.host.name, check="network", state="ok", value=value)


@contextlib.contextmanager
def _shared_folder(run_dir: Path) -> Iterator[Path]:
    """Yield a new folder where the runs will be written, and remove it."""
    folder = nearest_folder(run_dir) / f".dstrain-doctor-{secrets.token_hex(4)}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class AllReduceJob(Job):
    """A job of all ranks that measures an all-reduce."""

    trains = True

    def to_argv(self) -> list[str]:
        return ["doctor", "--phase", "all-reduce"]

    def check_recipe(self) -> RunConfig:
        return RunConfig(timeout_minutes=1)

    def run(self, prepared: Prepared, world: World) -> dict[str, float]:
        """Return the number of ranks and the seconds of the fastest of some all-reduces. Collective."""
        import torch
        import torch.distributed as dist

        values = torch.ones(ALL_REDUCE_BYTES // 4, device=world.device)
        seconds = []
        for _ in range(ALL_REDUCE_ROUNDS + 1):  # the first one connects
            world.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - start)
        return {"ranks": world.size, "seconds": min(seconds[1:])}


def check_all_reduce(hostfile: str | None, run_dir: Path) -> Finding:
    """Run an all-reduce of ALL_REDUCE_BYTES on all ranks of a launch, and report its bandwidth."""
    log_stderr(f"doctor: an all-reduce of {format_bytes(ALL_REDUCE_BYTES)} on all ranks")
    before = os.environ.get("TMPDIR")
    try:
        with _shared_folder(run_dir) as folder:
            folder.mkdir()
            os.environ["TMPDIR"] = str(folder)  # where the ranks write their logs: all hosts must see it
            tempfile.tempdir = None
            result = run_job(AllReduceJob(), {"hostfile": hostfile} if hostfile else {}, None)
    except DstrainError as error:
        return Finding(host="all", check="all-reduce", state="fault", problem=str(error))
    finally:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    if result.exit_code:
        problem = (
            "the ranks could not exchange data (their messages are above); check NCCL_SOCKET_IFNAME and the firewalls"
        )
        return Finding(host="all", check="all-reduce", state="fault", problem=problem)
    ranks, seconds = int(result.value["ranks"]), result.value["seconds"]
    # Of a ring: each rank sends and receives 2 (n - 1) / n of the data.
    bandwidth = 2 * (ranks - 1) / ranks * ALL_REDUCE_BYTES / seconds
    value = f"{format_bytes(ALL_REDUCE_BYTES)} on {ranks} ranks in {seconds:.3f} s: {format_bytes(int(bandwidth))}/s per rank"
    return Finding(host="all", check="all-reduce", state="ok", value=value)


def show_findings(findings: Sequence[Finding]) -> str:
    """Return a line per check, grouped by host, problems below their check, and a summary."""
    lines: list[str] = []
    for host in dict.fromkeys(finding.host for finding in findings):
        lines.append(f"{host}:")
        for finding in (finding for finding in findings if finding.host == host):
            lines.append(f"  {finding.check:14} {finding.value or finding.state}")
            lines += [f"  {'':14} {finding.state}: {finding.problem}"] if finding.problem else []
    counts = {state: sum(finding.state == state for finding in findings) for state in ("fault", "warning")}
    lines.append("")
    lines.append(f"doctor: {len(findings)} checks, {counts['fault']} faults, {counts['warning']} warnings")
    return "\n".join(lines)


def findings_as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON: {"ok": true if nothing stops a run, "checks": [...]}."""
    checks = [asdict(finding) for finding in findings]
    return json.dumps({"ok": not any(finding.state == "fault" for finding in findings), "checks": checks}, indent=2)
