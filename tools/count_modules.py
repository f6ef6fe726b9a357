"""Count the dstrain modules on the way of a record from its file to the optimizer step.

python -m tools.count_modules [-v] rm "dpo, with images"

Each argument is a tiny recipe of tests/vision_recipes.py; "with images" is a vision-language model. The token
cache is cold. All functions are counted that run while the training records are opened, parsed, encoded,
cached, read again and collated, and during the optimizer steps of TorchEngine, which is plain PyTorch in one
process. Building the recipe, the task's model and the engine is not counted.

Two numbers are printed. The first counts the modules that ran: those with at least one such function. The
second counts the modules that records and batches pass: those with a function that is called more often when
the data and the steps are doubled. A function that is called once for a run, such as one that finds the cache
folder, is set-up: its module is in the first number only. The first run has more records than one chunk of the
encoder, so functions that are called once for a chunk are in both numbers. A loop inside of one call counts as
one call. -v names the functions.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HOUSE = f"{ROOT / 'dstrain'}{os.sep}"
STEPS = 2
"""Optimizer steps of the first run; the second takes twice as many."""


class Modules(NamedTuple):
    """Modules of dstrain with the functions that make them count."""

    ran: dict[str, list[str]]
    """With all functions that ran."""
    passed: dict[str, list[str]]
    """With the functions that are called again for further records or batches."""


def trace(work: Callable[[], Any]) -> Counter[CodeType]:
    """Return how often `work` runs each function of dstrain, in any thread."""
    calls: Counter[CodeType] = Counter()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Module and class bodies run once, when they are imported; they are not on the way.
        if event == "call" and code.co_flags & 0x2 and code.co_filename.startswith(HOUSE):
            calls[code] += 1

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def count(name: str) -> Modules:
    """Return the modules that run for a tiny recipe, and those that its records and batches pass."""
    once, twice = trace_recipe(name, 1), trace_recipe(name, 2)
    # Keyed by code: the second run meets the same code objects, since the modules are imported once.
    return Modules(
        _by_module(twice.keys() | once.keys()), _by_module({code for code in twice if twice[code] > once[code]})
    )


def _by_module(codes: set[CodeType]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
        found.setdefault(code.co_filename.removeprefix(HOUSE), []).append(code.co_qualname)
    return found


def trace_recipe(name: str, times: int) -> Counter[CodeType]:
    """Return the calls of a run with `times` copies of more than a chunk of records, and `times * STEPS` steps."""
    import torch

    from dstrain.config.schema import RunConfig
    from dstrain.data.loading.loader import Loader
    from dstrain.data.prepare import CHUNK_SIZE, IMAGE_CHUNK_SIZE
    from dstrain.models.params import build_param_groups
    from dstrain.tasks import make_task
    from dstrain.train.build_model import build_train_module
    from dstrain.train.engine.torch import TorchEngine
    from dstrain.train.setup.plan import BatchPlan, build_sample_plan
    from tests.vision_recipes import named_recipe

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DSTRAIN_CACHE"] = f"{folder}/cache"
        _, values = named_recipe(name, Path(folder))
        size = IMAGE_CHUNK_SIZE if name.endswith("with images") else CHUNK_SIZE
        repeat_records(Path(folder) / "train.jsonl", times * (size + size // 2))
        task = make_task(RunConfig.model_validate(values))
        module = build_train_module(task)  # trains the tokenizer, which is not on the way
        groups = build_param_groups(module.model, task.recipe.optim)
        engine = TorchEngine(module, groups, task.recipe.optim, torch.device("cpu"))
        os.environ["DSTRAIN_CACHE"] = f"{folder}/cold"  # training the tokenizer has opened the records

        def train() -> None:
            examples = task.examples("train")
            assert examples
            sampler = build_sample_plan(task, examples, BatchPlan(4, 2, 2), 1)
            loader = Loader(examples=examples, collate=task.collate, sampler=sampler, workers=1)
            steps = loader.iter_steps(0)
            for _ in range(times * STEPS):
                engine.step(next(steps).batches, 1e-3)

        return trace(train)


def repeat_records(file: Path, count: int) -> None:
    """Write `count` records: those of the file again and again, each with images of its own."""
    lines = file.read_text(encoding="utf-8").splitlines()
    records = [json.loads(lines[index % len(lines)]) for index in range(count)]
    for index, record in enumerate(records):
        if "images" in record:
            record["images"] = [copy_image(file.parent / name, index).name for name in record["images"]]
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def copy_image(path: Path, index: int) -> Path:
    """Write an image that differs from the one at `path` in a pixel."""
    from PIL import Image

    image = Image.open(path)
    image.putpixel((0, 0), (index % 256, index // 256, 0))
    copy = path.with_name(f"{index}-{path.name}")
    image.save(copy)
    return copy


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "-v"]
    for name in names or ["rm", "dpo, with images"]:
        ran, passed = count(name)
        print(f"{name}: {len(ran)} modules ran; records and batches passed {len(passed)} of them (*)")
        for file in ran:
            functions = passed.get(file, ran[file])
            print(
                f"  {'*' if file in passed else ' '} {file}{'  ' + ', '.join(functions) if '-v' in arguments else ''}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
