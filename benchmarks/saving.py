"""Measure how long a checkpoint blocks training: synchronous saves, and background saves from a host copy.

python -m benchmarks.saving [--shape 100m] [--preset zero2]
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import join_alone, made_batches, made_engine, made_task, ratio, run, wait_for
from dstrain.batch import Progress
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.saver import CheckpointSaver


def measure(
    *, shape: str = "100m", length: int = 64, preset: str = "zero2", precision: str = "fp32", rounds: int = 3
) -> dict[str, Any]:
    """Check that the files are equal, then measure seconds of blocked training and seconds until the checkpoint is complete."""
    world = join_alone()
    task = made_task(shape, length)
    engine = made_engine(task, preset, world, precision=precision)
    (batches,) = made_batches(task, 1, 1)
    engine.step(batches, task.recipe.optim.lr)
    size = engine.train_module.stored_model.estimate_checkpoint_bytes("adamw")
    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    ways = {
        name: CheckpointSaver(
            checkpoints=CheckpointStore(folder=folder / name, world=world.new_group(), keep=1),
            engine=engine, run_info={}, log_event=lambda *_, **__: None, checkpoint_size=size, background=name == "behind",
        )
        for name in ("waiting", "behind")
    }  # fmt: skip
    stalls: dict[str, list[float]] = {name: [] for name in ways}
    totals: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for turn in range(1 + rounds):
            for name, saving in ways.items():
                blocked, complete = _save(saving, turn, lambda: engine.evaluate(batches[0]), world.device)
                if turn:
                    stalls[name].append(blocked)
                    totals[name].append(complete)
            assert _state(folder / "waiting", turn) == _state(folder / "behind", turn), "the two wrote other files"
    finally:
        shutil.rmtree(folder)
    rows = []
    for name in ways:
        stall, total = (ratio(seconds, name, "waiting") for seconds in (stalls, totals))
        times = {"stall_ms": stall["median_ms"], "stall_ratio": stall["ratio"], "whole_after_ms": total["median_ms"]}
        rows.append({"saving": name, **times, "mib": size / 2**20})
    return {
        "settings": {"shape": shape, "length": length, "preset": preset, "precision": precision, "rounds": rounds},
        "checked": f"both wrote the same state in each of {1 + rounds} rounds, by the hashes of their manifests",
        "rows": rows,
    }


def _save(saving: CheckpointSaver, turn: int, step: Callable[[], Any], device: Any) -> tuple[float, float]:
    """Return seconds of blocked training, and seconds until the checkpoint is complete while training (an evaluation) runs."""
    wait_for(device)
    start = time.perf_counter()
    saving.save(Progress(turn, turn), None)
    stall = time.perf_counter() - start
    step()
    saving.wait()
    return stall, time.perf_counter() - start if saving.background else stall


def _state(folder: Path, turn: int) -> dict[str, Any]:
    files = json.loads((folder / f"step-{turn:08d}" / "MANIFEST.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".safetensors")}


if __name__ == "__main__":
    run(measure, __doc__ or "")
