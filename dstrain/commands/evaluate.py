"""dstrain evaluate: metrics of a trained model on a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain.commands.trained import load_trained
from dstrain.errors import DataError


def evaluate_model(folder: Path, data: str, task: str | None, sets: Sequence[str], step: str) -> dict[str, Any]:
    """Loss and metrics over the whole file, each a sum divided once."""
    import torch

    from dstrain.config.schema import OptimConfig
    from dstrain.models.freeze import Group
    from dstrain.train.engine import TorchEngine
    from dstrain.train.evaluate import Evaluation
    from dstrain.train.objective import Objective

    file = [f"data.eval={json.dumps(str(Path(data).expanduser().resolve()))}", "data.eval_fraction=0"]
    trained = load_trained(folder, step, [*file, *sets], task)
    examples = trained.task.examples("eval")
    if not examples:
        raise DataError(f"{data}: holds no sample to evaluate on")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = [Group(list(trained.model.parameters()), 1.0, 0.0)]
    engine = TorchEngine(Objective(trained.task, trained.model), whole, OptimConfig(name="sgd"), device)
    row = Evaluation(trained.task, examples, trained.task.recipe.batch.micro or 8).run(engine)
    return {"file": data, "step": trained.step, "examples": len(examples), **row}
