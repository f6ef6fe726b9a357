"""What the workers of test_counted do: steps at each ZeRO stage, with torch's own count of each group beside ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import distributed_c10d as c10d

from dstrain.training.evaluate import iter_eval_results
from tests.parity.cases import made, world
from tests.workers import worker_world


def step(kind: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of two steps and a look: (collectives entered, torch's count) by group, and the names of those entered."""
    run = made("rm", kind, 2, changes)
    run.engine.step(run.batches(list(range(8)), 2), lr=0.1)
    before = {name: (line["entered"], _sequence(name)) for name, line in worker_world().log.snapshot().items()}
    names: set[str] = set()
    for first in (8, 16):
        run.engine.step(run.batches(list(range(first, first + 7)), 2), lr=0.1)
        list(iter_eval_results(run.engine, run.task, lambda: run.batches(list(range(40, 46)), 1)))
    counts = {}
    for name, line in worker_world().log.snapshot().items():
        entered, sequence = before.get(name, (0, 0))
        counts[name] = (line["entered"] - entered, _sequence(name) - sequence)
        names |= set(line["names"]) if counts[name][0] else set()
    return {
        "counts": counts,
        "names": sorted(names),
        "inside": [one["entered"] - one["left"] for one in worker_world().log.snapshot().values()],
    }


def broadcast() -> dict[str, Any]:
    """What each rank has of rank 0's value, and the names of the collectives that took."""
    ranks = world()
    before = {name: line["entered"] for name, line in worker_world().log.snapshot().items()}
    got = ranks.broadcast({"of": 0, "rows": list(range(1000))} if ranks.rank == 0 else object())
    new = {name: line for name, line in worker_world().log.snapshot().items() if line["entered"] > before.get(name, 0)}
    return {"got": got, "names": [line["names"][-1] for line in new.values()]}


def _sequence(name: str) -> int:
    return int(c10d._resolve_process_group(name)._get_sequence_number_for_group())


def timeouts(kind: str, seconds: float) -> list[float]:
    """Of the groups that come to be while an engine is made, with references before, as a new process makes them."""
    patches = worker_world().patches
    assert patches is not None
    before, whole = set(c10d._world.pg_map), patches.timeout
    clone, groups._WORLD_GROUP = groups._WORLD_GROUP, None
    patches.timeout = timedelta(seconds=seconds)
    try:
        made("dpo", kind, 1, {"options": {"precompute_ref_log_probs": True}})
        dist.new_group()
    finally:
        patches.timeout = whole
        groups._WORLD_GROUP = clone or groups._WORLD_GROUP
    return [_timeout(group) for group in set(c10d._world.pg_map) - before]


def _timeout(group: Any) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
