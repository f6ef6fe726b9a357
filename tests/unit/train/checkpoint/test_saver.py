"""Behind training at most one checkpoint is in flight, and what it holds is what was there when it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.batch import Progress
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError
from dstrain.train.checkpoints import CheckpointStore
from dstrain.train.saver import CheckpointSaver
from dstrain.train.state import files
from dstrain.train.state.files import CheckpointReader, StateFile


class Weights:
    """An engine of one tensor."""

    world = SingleProcessWorld()

    def __init__(self) -> None:
        self.values = torch.zeros(1000)

    def state_files(self) -> Iterator[StateFile]:
        yield StateFile("rank-00000-000.safetensors", [("w/weight@0", self.values)])

    def state_metadata(self) -> dict[str, Any]:
        return {"shapes": {"w": [1000]}, "optimizer": "sgd"}


def saving(folder: Path, engine: Any, told: list[Any], **options: Any) -> CheckpointSaver:
    def tell(event: str, **about: Any) -> None:
        told.append((event, about))

    checkpoints = CheckpointStore(folder=folder, world=SingleProcessWorld())
    return CheckpointSaver(
        checkpoints=checkpoints,
        engine=engine,
        run_info={},
        log_event=tell,
        checkpoint_size=4000,
        **{"background": True, **options},
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    event, write = threading.Event(), files.write_state_file

    def wait(folder: Path, shard: StateFile) -> Any:
        assert event.wait(30)
        return write(folder, shard)

    monkeypatch.setattr(files, "write_state_file", wait)
    return event


def test_training_goes_on_and_the_checkpoint_holds_what_was_there(tmp_path: Path, gate: threading.Event) -> None:
    engine, told = Weights(), []  # type: ignore[var-annotated]
    kept = saving(tmp_path, engine, told)
    engine.values.fill_(1)
    kept.save(Progress(1, 1), None)
    assert not kept.is_finished
    assert not list(tmp_path.glob("step-*1/MANIFEST.json"))
    engine.values.fill_(2)  # training
    gate.set()
    kept.save(Progress(2, 2), None)  # waits for the first
    assert [event for event, _ in told] == ["saved"]
    kept.wait()
    for step in (1, 2):
        assert set(CheckpointReader(tmp_path / f"step-{step:08d}").read_tensor("w").tolist()) == {float(step)}
    assert all(0 < about["stall_seconds"] < about["seconds"] for _, about in told)
    spent = kept.pop_timings()
    assert 0 < spent["save_stall_seconds"] < spent["save_seconds"]
    assert kept.pop_timings() == {}


def test_the_last_one_is_there_on_return(tmp_path: Path) -> None:
    told: list[Any] = []
    kept = saving(tmp_path, Weights(), told)
    kept.save(Progress(1, 1), None, is_last=True)
    assert [about["step"] for _, about in told] == [1]
    assert told[0][1]["stall_seconds"] == told[0][1]["seconds"]


def test_a_failure_is_raised_where_training_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    kept = saving(tmp_path, Weights(), [])
    kept.save(Progress(1, 1), None)
    kept.wait()
    monkeypatch.setattr(files, "write_state_file", full)
    kept.save(Progress(2, 2), None)
    with pytest.raises(CheckpointError, match="No space left on device"):
        kept.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("why", ["disk", "memory"])
def test_where_a_copy_cannot_be_made_training_waits_and_it_is_said_once(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    if why == "memory":
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    kept = saving(tmp_path, Weights(), told, is_state_on_nvme=why == "disk")
    for step in (1, 2):
        kept.save(Progress(step, step), None)
    assert [event for event, _ in told] == ["async_save_unavailable", "saved", "saved"]
    assert ("is on a disk" if why == "disk" else "does not fit into host memory") in told[0][1]["why"]
