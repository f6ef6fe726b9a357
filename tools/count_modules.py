"""Count the dstrain modules that run between the first record of a file and the optimizer step.

python -m tools.count_modules rm "dpo, with images"

Each argument is a tiny recipe of tests/vision_recipes.py; "with images" is a vision-language model. The token
cache is cold. A module counts where one of its functions runs while the training records are opened,
parsed, encoded, cached, read again and collated, or during the optimizer step of TorchEngine, which
is plain PyTorch in one process. Building the recipe, the task's model and the engine is not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOUSE = f"{ROOT / 'dstrain'}{os.sep}"


def trace(work: Callable[[], Any]) -> set[str]:
    """Return the files of dstrain of which `work` runs a function, in any thread."""
    found: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Module and class bodies run once, when they are imported; they are not on the way.
        if event == "call" and code.co_flags & 0x2 and code.co_filename.startswith(HOUSE):
            found.add(code.co_filename.removeprefix(HOUSE))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def count(name: str) -> set[str]:
    """Return the modules that run for one optimizer step of a tiny recipe."""
    import torch

    from dstrain.config.schema import RunConfig
    from dstrain.data.loading.loader import Loader
    from dstrain.models.params.groups import build_param_groups
    from dstrain.tasks import make_task
    from dstrain.train.build_model import build_train_module
    from dstrain.train.engine.torch import TorchEngine
    from dstrain.train.plan import BatchPlan, build_sample_plan
    from tests.vision_recipes import named_recipe

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DSTRAIN_CACHE"] = f"{folder}/cache"
        _, values = named_recipe(name, Path(folder))
        task = make_task(RunConfig.model_validate(values))
        module = build_train_module(task)  # trains the tokenizer, which is not on the way
        groups = build_param_groups(module.model, task.recipe.optim)
        engine = TorchEngine(module, groups, task.recipe.optim, torch.device("cpu"))

        def step() -> None:
            examples = task.examples("train")
            assert examples
            sampler = build_sample_plan(task.recipe, examples, BatchPlan(4, 2, 2), 1)
            loader = Loader(examples=examples, collate=task.collate, sampler=sampler, workers=1)
            engine.step(next(iter(loader.iter_steps(0))).batches, 1e-3)

        return trace(step)


def main(names: list[str]) -> None:
    for name in names:
        found = sorted(count(name))
        print(f"{name}: {len(found)} modules")
        for file in found:
            print(f"  {file}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["rm", "dpo, with images"])
