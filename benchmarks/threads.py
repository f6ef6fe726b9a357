"""Measure a step with one and several threads, on cores of their own and beside busy loops: ratios as a Markdown table.

    python -m benchmarks.threads [--shapes tiny,3m] [--rounds 12] [--busy alone,2]

Each variant is a process of its own, since libgomp reads its variables when it is loaded. They take turns: in a round
each runs once, and a ratio compares two of one round. `alone`: the step has a real-time priority, so that it has the
cores of a busy machine to itself (root only). A number: so many loops in Python run beside it, at the same priority.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.common import ROOT, arguments, certificate

LOOP = "while True: pass"
SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Variant:
    """Threads of a process, and how long they spin before they sleep."""

    threads: int
    spin_count: str | None = None
    """GOMP_SPINCOUNT; None: libgomp's own, 300,000."""

    def __str__(self) -> str:
        spins = "" if self.threads == 1 else f", GOMP_SPINCOUNT {self.spin_count or 'not set'}"
        return f"{self.threads} thread{'s' * (self.threads > 1)}{spins}"


class StepProcess:
    """A process that takes steps when it is asked."""

    def __init__(self, variant: Variant, shape: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in SPIN_VARIABLES}
        env |= {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": str(variant.threads),
            "MKL_NUM_THREADS": str(variant.threads),
        }
        if variant.spin_count is not None:
            env["GOMP_SPINCOUNT"] = variant.spin_count
        words = [sys.executable, "-m", "benchmarks.threads", "--worker", shape]
        self._process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, seconds: float, alone: bool = False) -> dict[str, float]:
        """Take steps for so long; return the seconds of one, and what it took of the processor."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds} {int(alone)}\n")
        self._process.stdin.flush()
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"a process ended with {self._process.wait()}")
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(shape: str) -> None:
    """Take steps as the lines of stdin ask; the process of a variant."""
    import torch

    from benchmarks.common import made_batches, made_task
    from benchmarks.step import ByHand

    task = made_task(shape, 64, changes={"model": {"gradient_checkpointing": False}})
    engine = ByHand(task, torch.device("cpu"), "fp32")
    batches = made_batches(task, 4, 4)
    engine.step(batches[0], 1e-4)
    for line in sys.stdin:
        limit, alone = line.split()
        set_real_time(alone == "1")
        before, begin, steps = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0
        while time.perf_counter() - begin < float(limit) or steps < 2:
            engine.step(batches[steps % len(batches)], 1e-4)
            steps += 1
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
        found = {
            "seconds": seconds, "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "waits": after.ru_nvcsw - before.ru_nvcsw,
        }  # fmt: skip
        set_real_time(False)
        print(json.dumps({name: value / steps for name, value in found.items()}), flush=True)


def set_real_time(enabled: bool) -> None:
    """Give all threads of this process a real-time priority, or the usual one again."""
    policy = os.SCHED_FIFO if enabled else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(1 if enabled else 0))


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Context with so many processes that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def step_processes(variants: list[Variant], shape: str) -> Iterator[list[StepProcess]]:
    """Context with a process for each variant, which has taken some steps."""
    processes = [StepProcess(variant, shape) for variant in variants]
    try:
        for process in processes:
            process.run(0.0)
        yield processes
    finally:
        for process in processes:
            process.close()


def measure(processes: list[StepProcess], busy: str, rounds: int, seconds: float) -> list[list[dict[str, float]]]:
    """Return what each process took in each round. `busy`: `alone`, or the number of busy loops."""
    found: list[list[dict[str, float]]] = [[] for _ in processes]
    with busy_cores(0 if busy == "alone" else int(busy)):
        for number in range(rounds):
            for index in range(len(processes)):
                which = (number + index) % len(processes)
                found[which].append(processes[which].run(seconds, busy == "alone"))
    return found


def median_ratio(taken: list[dict[str, float]], base: list[dict[str, float]], name: str) -> str:
    """Return the median of the ratios within each round."""
    return f"{statistics.median(one[name] / other[name] for one, other in zip(taken, base, strict=True)):.2f}"


def main() -> None:
    """Print the table."""
    told: Any = arguments(
        __doc__ or "", shapes="tiny,3m", rounds=12, seconds=0.2, busy="alone,2", spins="0,100,1000,10000,"
    )
    cores = len(os.sched_getaffinity(0))
    variants = [Variant(1), *(Variant(cores, count or None) for count in told.spins.split(","))]
    print(json.dumps(certificate()))
    print("| shape | cores | variant | step ms | time to one thread | CPU time to one thread | waits of a step |")
    print("|" + "---|" * 7, flush=True)
    for shape in told.shapes.split(","):
        with step_processes(variants, shape) as processes:
            for busy in told.busy.split(","):
                found = measure(processes, busy, told.rounds, told.seconds)
                for variant, taken in zip(variants, found, strict=True):
                    ratios = [median_ratio(taken, found[0], name) for name in ("seconds", "cpu_seconds")]
                    place = "its own" if busy == "alone" else f"beside {busy} busy loops"
                    milliseconds = 1000 * statistics.median(one["seconds"] for one in taken)
                    waits = statistics.median(one["waits"] for one in taken)
                    cells = (shape, place, variant, f"{milliseconds:.1f}", *ratios, f"{waits:.0f}")
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        serve(sys.argv[-1])
    else:
        main()
