"""Patches of torch.distributed: what they do, that they can be undone, and that torch still needs them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dstrain.distributed.collective_log import CollectiveLog
from dstrain.distributed.patches import LOGGED_COLLECTIVES, CollectivePatches
from dstrain.distributed.world import TorchWorld

TIMEOUT = timedelta(seconds=77)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    yield
    assert not dist.is_initialized()


def functions() -> dict[str, Any]:
    names = (*LOGGED_COLLECTIVES, "new_group")
    found = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    return found | {f"c10d.{name}": getattr(c10d, name) for name in ("all_gather_into_tensor", "new_group")}


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(CPU).options._timeout


def test_torch_gives_a_new_group_half_an_hour_whatever_the_world_has() -> None:
    """Fails once a new group takes the timeout of the default group: then `_with_timeout` can go."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        assert timeout_of(dist.new_group()) == timedelta(minutes=30)
    finally:
        dist.destroy_process_group()


def test_new_groups_get_the_timeout_of_the_run_or_their_own() -> None:
    world = TorchWorld.join(CPU, TIMEOUT)
    try:
        assert timeout_of(dist.new_group()) == TIMEOUT
        assert timeout_of(c10d.new_group()) == TIMEOUT, "DeepSpeed may take it from here"
        assert timeout_of(dist.new_group(timeout=timedelta(seconds=5))) == timedelta(seconds=5)
    finally:
        world.close()


def test_closing_puts_all_functions_back_and_a_second_world_starts_from_zero() -> None:
    before = functions()
    for _ in range(2):
        world = TorchWorld.join(CPU, TIMEOUT)
        assert all(inspect.unwrap(function) is not function for function in functions().values())
        assert len(functions()) == len(before)
        assert world.sum([1.0]) == [1.0]
        names = [name for entry in world.log.snapshot().values() for name in entry["names"]]
        assert names == ["new_group", "all_reduce"]
        world.close()
        assert functions() == before


def test_a_start_that_fails_puts_all_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no network")

    before = functions()
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(ValueError, match="no network"):
        TorchWorld.join(CPU, TIMEOUT)
    assert functions() == before


def test_every_logged_collective_takes_a_group() -> None:
    """Otherwise it would be counted for the default group."""
    assert [name for name in LOGGED_COLLECTIVES if hasattr(dist, name)]
    for name in LOGGED_COLLECTIVES:
        if hasattr(dist, name):
            assert "group" in inspect.signature(getattr(dist, name)).parameters, name


def test_a_patch_wraps_once() -> None:
    patches = CollectivePatches(CollectiveLog(), TIMEOUT)
    before = dist.all_reduce
    patches.apply()
    try:
        assert dist.all_reduce.__wrapped__ is before
    finally:
        patches.undo()
    assert dist.all_reduce is before
