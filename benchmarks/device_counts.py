"""Count launches, waits and copies of training on an emulated CUDA device, beside a plain DeepSpeed loop.

    python -m tools.cuda_emulator python -m benchmarks.device_counts --to docs/measurements/gpu-waits.md [--tasks sft,rm]

Tiny models, one process, bf16. A step has 4 samples in one micro-batch; the further micro-batches are those of a step
with the same samples in four. Each run is a fork of this process, which has imported torch but used no device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import certificate, join_alone, table, write_table
from benchmarks.forks import fork
from tools.cuda_emulator.counts import read_counts

STEPS, FIRST_COUNTED = 10, 5
"""Steps of a run, and the first of those that are counted: buffers are made and the updates are checked before."""
LOG_EVERY = 4
SAMPLES = 4
WAITS = ("device_syncs", "stream_syncs", "event_syncs", "copies_to_host", "copies_from_paged")
SHOWN = ("kernels", "products", *WAITS, "copies_from_pinned")

Counts = dict[str, int]


@dataclass(frozen=True)
class CountedRun:
    """A training run on a tiny model."""

    task: str
    preset: str = "zero2"
    micro_batches: int = 1
    is_plain: bool = False
    """True for the loop on DeepSpeed of benchmarks/speed instead of dstrain."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Overrides sections of the recipe."""

    @property
    def name(self) -> str:
        """The row of the table."""
        return f"{'plain DeepSpeed' if self.is_plain else 'dstrain'} {self.task}"


def count_run(run: CountedRun) -> dict[str, Counts]:
    """Return the counts of `step`, `log row` and `evaluation`, each the largest of those counted, in a new process.

    Of a plain loop `step` alone. Raises RuntimeError where the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="dstrain-counts-") as name:
        result = Path(name) / "counts.json"
        _, status = os.waitpid(fork(lambda: _write_counts(run, Path(name), result), Path(name) / "log"), 0)
        if status or not result.is_file():
            log = (Path(name) / "log").read_text(errors="replace")
            raise RuntimeError(f"{run.name} at {run.preset} failed:\n{log[-3000:]}")
        return dict(json.loads(result.read_text()))


def _write_counts(run: CountedRun, folder: Path, result: Path) -> None:
    import torch

    torch.cuda._is_in_bad_fork = lambda: False  # an emulated device has no state that a fork would break
    counts = _count_plain(run, folder) if run.is_plain else _count_training(run, folder)
    result.write_text(json.dumps(counts))


def _make_recipe(run: CountedRun, folder: Path) -> dict[str, Any]:
    from dstrain.tasks import find_task

    recipe = find_task(run.task).tiny(folder)
    recipe |= {
        "steps": STEPS,
        "precision": "bf16",
        "ds_config": run.preset,
        "batch": {**recipe.get("batch", {}), "total": SAMPLES, "micro": SAMPLES // run.micro_batches},
        "log": {"every": LOG_EVERY, "tensorboard": False},
        "eval": {**recipe.get("eval", {}), "every": LOG_EVERY},
        "save": {"every": 10 * STEPS},
    }
    for section, values in run.changes.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    return recipe


def _count_training(run: CountedRun, folder: Path) -> dict[str, Counts]:
    """Train as a launcher's process does, and count between the beginnings of steps, without rows and evaluations."""
    import yaml

    from dstrain.cli import main
    from dstrain.training.run import Run

    parts: dict[str, list[Counts]] = {"log row": [], "evaluation": [], "save": []}
    begun: list[Counts] = []
    inside: list[Counts] = []
    take_step = Run.take_step

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = read_counts()
            result = function(*args, **kwargs)
            parts[name].append(_difference(before, read_counts()))
            if inside:
                inside[-1] = _sum(inside[-1], parts[name][-1])
            return result

        return call

    def begin_step(*args: Any, **kwargs: Any) -> Any:
        begun.append(read_counts())
        inside.append(dict.fromkeys(begun[-1], 0))
        return take_step(*args, **kwargs)

    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(_make_recipe(run, folder)))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**rank, "MASTER_PORT": str(_free_port())})
    Run.take_step = begin_step  # type: ignore[method-assign]
    Run.log_train_metrics = counted("log row", Run.log_train_metrics)  # type: ignore[method-assign]
    Run.evaluate = counted("evaluation", Run.evaluate)  # type: ignore[method-assign]
    Run.save_checkpoint = counted("save", Run.save_checkpoint)  # type: ignore[method-assign]
    sys.argv = ["dstrain", "train", str(path), "--run-dir", str(folder / "run")]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    whole = [_difference(first, second) for first, second in pairwise(begun)]
    steps = [_difference(part, all_of_it) for part, all_of_it in zip(inside, whole, strict=False)]
    counts = {"step": _largest(steps[FIRST_COUNTED - 1 :]), "log row": _largest(parts["log row"][1:])}
    return counts | ({"evaluation": _largest(parts["evaluation"][1:])} if parts["evaluation"][1:] else {})


def _count_plain(run: CountedRun, folder: Path) -> dict[str, Counts]:
    from benchmarks.speed.plain_deepspeed import PlainDeepSpeed
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task

    world = join_alone()
    assert world.device.type == "cuda"
    task = make_task(RunConfig.model_validate(_make_recipe(run, folder)))
    samples = task.examples("train")
    plain = PlainDeepSpeed(task, run.task, [samples[index] for index in range(len(samples))], "bf16")
    steps = []
    for _ in range(STEPS):
        before = read_counts()
        plain()
        steps.append(_difference(before, read_counts()))
    return {"step": _largest(steps[FIRST_COUNTED - 1 :])}


def _free_port() -> int:
    from dstrain.launch.command import free_port

    return free_port()


def _difference(before: Counts, after: Counts) -> Counts:
    return {name: after[name] - before[name] for name in after}


def _sum(first: Counts, second: Counts) -> Counts:
    return {name: first[name] + second[name] for name in first}


def _largest(counts: Sequence[Counts]) -> Counts:
    return {name: max(each[name] for each in counts) for name in counts[0]}


PRESETS = ("zero0", "zero1", "zero2", "zero3")
PLAIN = ("sft", "rm", "dpo")
TASKS = ("sft", "rm", "dpo", "kto", "prm", "vlm", "docqa", "temporal", "protein")


def all_runs() -> list[CountedRun]:
    """Return the runs of the table."""
    plain = [CountedRun(task, is_plain=True) for task in PLAIN]
    stages = [CountedRun("sft", preset) for preset in PRESETS if preset != "zero2"]
    lora = CountedRun("sft", changes={"model": {"lora": {"rank": 4, "alpha": 8}}})
    return [*plain, *(CountedRun(task) for task in TASKS), *stages, lora]


def rows_of(run: CountedRun) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run: its step, of sft each further micro-batch, a log row and an evaluation."""
    counts = count_run(run)
    label = run.name + (", LoRA" if "model" in run.changes else "")
    if run.task == "sft" and not run.is_plain:
        many = CountedRun(run.task, run.preset, SAMPLES, changes=run.changes)
        further = count_run(many)["step"]
        counts["further micro-batch"] = {
            name: round((further[name] - counts["step"][name]) / (SAMPLES - 1), 1) for name in further
        }
    for part in ("step", "further micro-batch", "log row", "evaluation"):
        if part in counts:
            yield {"run": label, "preset": run.preset, "of": part, **{name: counts[part][name] for name in SHOWN}}


def import_all() -> None:
    """Import what every run needs, once and before the forks."""
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import dstrain.training.build_run
    import dstrain.training.run  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    parser.add_argument("--tasks", default=None, help="only these, separated by commas")
    options = parser.parse_args()
    wanted = None if options.tasks is None else options.tasks.split(",")
    rows: list[dict[str, Any]] = []
    import_all()
    for run in all_runs():
        if wanted is None or run.task in wanted:
            rows += rows_of(run)
    about = certificate()
    about["hardware"] = f"emulated: {about['hardware']}"
    about["versions"] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    record = "\n".join(f"- {key}: {value}" for key, value in about.items())
    write_table(f"{record}\n\n{table(rows)}", "benchmarks.device_counts", options.to)


if __name__ == "__main__":
    main()
