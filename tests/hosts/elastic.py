"""torchrun on two hosts, from one to two of them, as a Markdown table: `python -m tests.hosts.elastic [NAME...]`."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.launch.worker import log_path
from tests.hosts.faults import HARM_AT
from tests.hosts.lab import Command, Lab, missing, wait_for
from tests.hosts.running import START_SECONDS, Run, print_rows
from tests.workers import ROOT

PORT = "29400"
RESTARTS = 3


@dataclass(frozen=True)
class Row:
    """What became of a run."""

    what: str
    seconds: float
    """From the harm to the first step that was taken after it; to the end where none was."""
    codes: tuple[int, ...]
    """Exit codes of the agents that were alive at the end, in the order of the hosts."""
    resumed_at: tuple[tuple[int, int], ...]
    """(step, processes) of each start after the first one."""
    lost: int
    """Steps that were taken twice."""
    wrong: tuple[str, ...] = ()
    """What is not as promised."""


class Job:
    """A run that an agent on each host starts."""

    def __init__(
        self, lab: Lab, folder: Path, hosts: Sequence[int] = (1, 2), by_hand: Sequence[str] = (), **changes: Any
    ) -> None:
        """`by_hand`: options of torchrun, without the script. `changes`: keys of the recipe."""
        self.lab, self.run, self.by_hand = lab, Run(folder, **changes), by_hand
        self.agents: dict[int, Command] = {}
        self.harmed_at, self.taken = time.monotonic(), 0
        for host in hosts:
            self.start_agent(host)

    def start_agent(self, host: int) -> None:
        """Start launchers/torchrun.sh on a host, or torchrun itself with `by_hand` options."""
        if self.by_hand:
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            words += [*self.by_hand, "--max-restarts", str(RESTARTS), "--local-addr", f"host{host}"]
            words += ["--node-rank", str(host - 1)] if "static" in self.by_hand else []
            words += ["-m", "dstrain.cli", *self.run.arguments]
            self.agents[host] = self.lab.start(host, words, env={"DS_ACCELERATOR": "cpu"}, cwd=self.run.folder)
            return
        place = {"NODES": "1:2", "MASTER_ADDR": "host1", "MASTER_PORT": PORT, "LOCAL_ADDR": f"host{host}"}
        env = {**place, "GPUS": "1", "RESTARTS": str(RESTARTS), "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"}
        words = [str(ROOT / "launchers/torchrun.sh"), *self.run.arguments[1:]]
        self.agents[host] = self.lab.start(host, words, env=env, cwd=self.run.folder)

    def said(self) -> str:
        """The ends of the agents' outputs and of the ranks' logs."""
        logs = [log_path(self.run.run_dir, rank) for rank in (0, 1)]
        texts = [agent.output()[-3000:] for agent in self.agents.values()]
        return "\n".join([*texts, *(path.read_text(errors="replace")[-3000:] for path in logs if path.exists())])

    def wait_for_step(self, step: int, alive: Sequence[int] = (1,)) -> None:
        """Wait until the step is logged."""

        def is_there() -> bool:
            for host in alive:
                assert self.agents[host].code is None, f"host{host} ended with {self.agents[host].code}:\n{self.said()}"
            return self.run.step() >= step

        wait_for(is_there, START_SECONDS, f"no step {step}: {self.said()}")

    def harm(self) -> None:
        """Call it just before the harm."""
        self.harmed_at, self.taken = time.monotonic(), self.run.step()

    def starts(self) -> list[tuple[int, int]]:
        """(step, processes) of each start after the first one."""
        path = self.run.run_dir / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(row["step"], row["world_size"]) for row in rows if row["event"] == "started"][1:]

    def wait_for_start(self, count: int = 1) -> float:
        """Wait until the run has gone on, this many times in all, and took a step; seconds since the harm."""
        wait_for(lambda: len(self.starts()) >= count, START_SECONDS, f"the run does not go on: {self.said()}")
        step = self.starts()[-1][0]
        wait_for(lambda: self.run.step() > step, START_SECONDS, f"no step: {self.said()}")
        return time.monotonic() - self.harmed_at

    def row(
        self, what: str, seconds: float | None, processes: Sequence[int], losses: Sequence[Any] | None, lost: int,
        codes: Sequence[int] = (0, 0),
    ) -> Row:  # fmt: skip
        """Let the run end; compare the processes of its starts, exit codes and losses with what is promised.

        `lost`: largest number of steps that may be taken twice.
        """
        self.run.pace(None)
        wait_for(
            lambda: all(agent.code is not None for agent in self.agents.values()),
            START_SECONDS,
            f"no end: {self.said()}",
        )
        seconds = time.monotonic() - self.harmed_at if seconds is None else seconds
        found = tuple(self.agents[host].code or 0 for host in sorted(self.agents))
        starts, left = self.starts(), self.lab.left(within=5)
        wrong = [] if found == tuple(codes) else [f"exit codes {found}, not {tuple(codes)}"]
        wrong += [] if [size for _, size in starts] == [*processes] else [f"starts {starts}, not with {processes}"]
        wrong += [f"left: {left}"] if left else []
        wrong += ["other losses"] if losses is not None and not are_close(self.run.losses(), losses) else []
        again = max(self.taken - starts[0][0], 0) if starts else 0
        wrong += [f"{again} steps were taken twice"] if again > lost else []
        return Row(what, round(seconds, 1), found, tuple(starts), again, (*wrong, *([self.said()] if wrong else [])))


def are_close(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Return True for the same steps with losses that differ by the order of sums alone."""
    return len(found) == len(wanted) and all(
        a[:2] == b[:2] and math.isclose(a[2], b[2], rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)
    )


def two_hosts(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """No harm: the losses of one host, to the bit."""
    job = Job(lab, folder)
    job.run.pace(None)
    row = job.row("none", None, [], losses, 0)
    return row if job.run.losses() == losses else replace(row, wrong=(*row.wrong, "losses differ in some bit"))


def _worker_killed(what: str, by_hand: Sequence[str], lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    job = Job(lab, folder, by_hand=by_hand)
    job.wait_for_step(HARM_AT)
    job.harm()
    assert lab.kill(*job.run.rank(1))
    return job.row(what, job.wait_for_start(), [2], losses, 6)


def worker_killed(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """All ranks start again on both hosts."""
    return _worker_killed("SIGKILL of a rank", (), lab, folder, losses)


def worker_killed_c10d(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """torchrun as users type it: its agents share one store, which lives on."""
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"host1:{PORT}", "--rdzv-id", "one")
    return _worker_killed("SIGKILL of a rank, plain torchrun, c10d", options, lab, folder, losses)


def worker_killed_static(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """torchrun with a fixed number of hosts."""
    options = ("--rdzv-backend", "static", "--master-addr", "host1", "--master-port", PORT)
    return _worker_killed("SIGKILL of a rank, plain torchrun, static", options, lab, folder, losses)


def _lose_host2(what: str, harm: Callable[[], object], lost: int, lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """Do harm to host2, which does not come back: host1 goes on alone."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    job.harm()
    harm()
    seconds = job.wait_for_start()
    del job.agents[2]
    return job.row(what, seconds, [1], losses, lost, (0,))


def agent_killed(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """The rank of host2 ends with its agent."""
    harm = partial(_signal_agent, lab, 2, signal.SIGKILL)
    return _lose_host2("SIGKILL of the agent on host2", harm, 6, lab, folder, losses)


def agent_stopped(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """As a spot machine that is taken away: all ranks save."""
    harm = partial(_signal_agent, lab, 2, signal.SIGTERM)
    return _lose_host2("SIGTERM to the agent on host2", harm, 0, lab, folder, losses)


def host_off(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """A host loses its power, and nobody is told."""
    return _lose_host2("host2 powered off", partial(lab.poweroff, 2), 6, lab, folder, losses)


def _signal_agent(lab: Lab, host: int, number: int) -> None:
    assert lab.kill(host, r"torch\.distributed\.run", number)


def host_back(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """The run shrinks to host1, and grows again when host2 is back."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    job.harm()
    lab.poweroff(2)
    job.wait_for_start()
    job.run.pace(1.0)
    lab.boot(2)
    job.harm()
    job.start_agent(2)
    seconds = job.wait_for_start(2)
    row = job.row("host2 off, then on again", seconds, [1, 2], losses, 40)
    again = job.taken - row.resumed_at[1][0] if len(row.resumed_at) == 2 else 0
    return replace(
        row, lost=max(again, 0), wrong=(*row.wrong, *([f"{again} steps lost by growing"] if again > 0 else []))
    )


def host_joins(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """The run begins on host1 alone."""
    job = Job(lab, folder, hosts=(1,))
    job.wait_for_step(HARM_AT)
    job.run.pace(1.0)
    job.harm()
    job.start_agent(2)
    return job.row("host2 joins later", job.wait_for_start(), [2], losses, 0)


def first_agent_killed(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """The agent of host1, which holds the rendezvous: the run ends, and the same commands continue it."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    job.harm()
    _signal_agent(lab, 1, signal.SIGKILL)
    wait_for(lambda: job.agents[2].code is not None, START_SECONDS, f"no end on host2: {job.said()}")
    seconds = time.monotonic() - job.harmed_at
    ended = job.agents[2].code
    for host in (1, 2):
        job.start_agent(host)
    row = job.row("SIGKILL of the agent on host1; both started again", seconds, [2], losses, 6)
    return row if ended == 1 else replace(row, wrong=(*row.wrong, f"host2 ended with {ended}"))


def bad_data(lab: Lab, folder: Path, losses: Sequence[Any]) -> Row:
    """Exit code 2 is not tried again."""
    path = folder.with_name(f"{folder.name}-bad.jsonl")
    path.write_text('{"no": "pair"}\n' * 8)
    job = Job(lab, folder, data={"train": str(path), "max_length": 64})
    row = job.row("data that cannot be used", None, [], None, 0, (1, 1))
    tries = log_path(job.run.run_dir, 0).read_text().count("records (100.0%) cannot be used")
    return row if tries == 1 else replace(row, wrong=(*row.wrong, f"it was tried {tries} times", job.said()))


ROWS = (
    two_hosts,
    worker_killed,
    worker_killed_c10d,
    worker_killed_static,
    agent_stopped,
    agent_killed,
    host_off,
    host_back,
    host_joins,
    first_agent_killed,
    bad_data,
)


def main() -> None:
    """Print a row for each."""
    columns = ("harm", "s until it goes on", "exit codes", "went on at step, with processes", "steps lost")
    print_rows(ROWS, missing(), Lab, columns, to_cells)


def to_cells(row: Row) -> tuple[Any, ...]:
    """Return what the table shows of a row."""
    starts = "; ".join(f"{step}, {size}" for step, size in row.resumed_at)
    return row.what, row.seconds, ", ".join(map(str, row.codes)), starts, row.lost


if __name__ == "__main__":
    main()
