"""Save an engine's state to a checkpoint folder and load it, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.batch import Progress
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.state.files import CheckpointReader, write_state


def keep(engine: Any, folder: Path, step: int = 1) -> Path:
    """Commit a checkpoint of the engine; return its folder. Collective."""
    about = engine.state_metadata() if engine.world.rank == 0 else None
    checkpoints = CheckpointStore(folder=folder, world=engine.world)
    return checkpoints.save(lambda path: write_state(path, engine.state_files(), about), Progress(step, step), {})


def go_on(engine: Any, checkpoint: Path) -> None:
    """Load what `keep` wrote. Collective."""
    engine.load(CheckpointReader(checkpoint))
