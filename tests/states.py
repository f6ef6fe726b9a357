"""An engine's state to a checkpoint folder and back, without a run around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.batch import Progress
from dstrain.train.checkpoint.checkpoints import CheckpointStore
from dstrain.train.state.files import CheckpointReader, write_state


def keep(engine: Any, folder: Path, step: int = 1) -> Path:
    """Commit a checkpoint of this engine; returns its folder. Collective."""
    about = engine.state_metadata() if engine.world.rank == 0 else None
    checkpoints = CheckpointStore(folder=folder, world=engine.world)
    return checkpoints.save(lambda path: write_state(path, engine.state_files(), about), Progress(step, step), {})


def go_on(engine: Any, checkpoint: Path) -> None:
    """Load what `keep` wrote. Collective."""
    engine.load(CheckpointReader(checkpoint))
