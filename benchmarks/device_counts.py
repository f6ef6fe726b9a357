"""Count launches, waits and copies of training on emulated CUDA devices, beside a plain DeepSpeed loop and TRL.

    EMU_GPUS=2 python -m tools.cuda_emulator python -m benchmarks.device_counts --to docs/measurements/gpu-waits.md

Tiny models, bf16, one or two processes. A step has 4 samples of each process in one micro-batch; the further
micro-batches are those of a step with the same samples in four. Each process of a run is a fork of this one, which has
imported torch but used no device. TRL is counted where it can be imported (`pip install trl==1.16.0`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import certificate, format_certificate, join_alone, table, write_table
from benchmarks.forks import fork
from tests.tiny import tiny_recipe
from tools.cuda_emulator.counts import read_counts

STEPS, FIRST_COUNTED = 10, 5
"""Steps of a run, and the first of those that are counted: buffers are made and the updates are checked before."""
LOG_EVERY = 4
RECIPE = "recipe.yaml"
SAMPLES = 4
WAITS = ("device_syncs", "stream_syncs", "event_syncs", "copies_to_host", "copies_from_paged")
SHOWN = ("kernels", "products", *WAITS, "copies_from_pinned")

Counts = dict[str, int]
DSTRAIN, PLAIN, TRL = "dstrain", "plain DeepSpeed", "TRL"
"""Programs that are counted: PLAIN is the loop of benchmarks/speed, TRL the trainer of the task without ZeRO."""


@dataclass(frozen=True)
class CountedRun:
    """A training run on a tiny model."""

    task: str
    preset: str = "zero2"
    micro_batches: int = 1
    program: str = DSTRAIN
    processes: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Overrides sections of the recipe."""

    @property
    def name(self) -> str:
        """The row of the table."""
        return f"{self.program} {self.task}"


def count_run(run: CountedRun) -> dict[str, Counts]:
    """Return the counts of `step`, `log row` and `evaluation`, each the largest of those counted, in new processes.

    Of several ranks the largest. Of other programs than dstrain `step` alone. Raises RuntimeError where the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="dstrain-counts-") as name:
        folder, port = Path(name), _free_port()
        _write_recipe(run, folder)
        ranks = range(run.processes)
        processes = [
            fork(lambda rank=rank: _write_counts(run, folder, rank, port), folder / f"log-{rank}")  # type: ignore[misc]
            for rank in ranks
        ]
        if not _wait_for_all(processes):
            logs = [(folder / f"log-{rank}").read_text(errors="replace")[-3000:] for rank in ranks]
            raise RuntimeError(f"{run.name} at {run.preset} failed:\n" + "\n".join(logs))
        counts = [json.loads((folder / f"counts-{rank}.json").read_text()) for rank in ranks]
        return {part: _largest([of_rank[part] for of_rank in counts]) for part in counts[0]}


def _wait_for_all(processes: Sequence[int]) -> bool:
    """Return whether all child processes exit with code 0; where one does not, the others are ended."""
    left, is_ok = set(processes), True
    while left:
        process, status = os.wait()
        left.discard(process)
        if status and is_ok:
            is_ok = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return is_ok


def _write_counts(run: CountedRun, folder: Path, rank: int, port: int) -> None:
    import torch

    torch.cuda._is_in_bad_fork = lambda: False  # an emulated device has no state that a fork would break
    if run.program == TRL:
        torch.cuda.device_count = lambda: 1  # else its one process takes all of them
    else:
        size = {"WORLD_SIZE": str(run.processes), "LOCAL_WORLD_SIZE": str(run.processes)}
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update({**size, **place})
    count = {DSTRAIN: _count_training, PLAIN: _count_plain, TRL: _count_trl}[run.program]
    (folder / f"counts-{rank}.json").write_text(json.dumps(count(run, folder / RECIPE)))


def _write_recipe(run: CountedRun, folder: Path) -> None:
    import yaml

    recipe = tiny_recipe(run.task, folder)
    total, micro = SAMPLES * run.processes, SAMPLES // run.micro_batches
    recipe |= {
        "steps": STEPS,
        "precision": "bf16",
        "ds_config": "zero0" if run.program == TRL else run.preset,
        "batch": {**recipe.get("batch", {}), "total": total, "micro": micro},
        "log": {"every": LOG_EVERY, "tensorboard": False},
        "eval": {**recipe.get("eval", {}), "every": LOG_EVERY},
        "save": {"every": 10 * STEPS},
    }
    for section, values in run.changes.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    (folder / RECIPE).write_text(yaml.safe_dump(recipe))


def _make_task(recipe: Path) -> Any:
    import yaml

    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task

    return make_task(RunConfig.model_validate(yaml.safe_load(recipe.read_text())))


def _count_training(run: CountedRun, recipe: Path) -> dict[str, Counts]:
    """Train as a launcher's process does, and count between the beginnings of steps, without rows and evaluations."""
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

    Run.take_step = begin_step  # type: ignore[method-assign]
    Run.log_train_metrics = counted("log row", Run.log_train_metrics)  # type: ignore[method-assign]
    Run.evaluate = counted("evaluation", Run.evaluate)  # type: ignore[method-assign]
    Run.save_checkpoint = counted("save", Run.save_checkpoint)  # type: ignore[method-assign]
    sys.argv = ["dstrain", "train", str(recipe), "--run-dir", str(recipe.parent / "run")]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    whole = [_difference(first, second) for first, second in pairwise(begun)]
    steps = [_difference(part, all_of_it) for part, all_of_it in zip(inside, whole, strict=False)]
    counts = {"step": _largest(steps[FIRST_COUNTED - 1 :]), "log row": _largest(parts["log row"][1:])}
    return counts | ({"evaluation": _largest(parts["evaluation"][1:])} if parts["evaluation"][1:] else {})


def _count_plain(run: CountedRun, recipe: Path) -> dict[str, Counts]:
    from benchmarks.speed.plain_deepspeed import PlainDeepSpeed

    world = join_alone()
    assert world.device.type == "cuda"
    task = _make_task(recipe)
    samples = task.examples("train")
    of_rank = [samples[index] for index in range(world.rank, len(samples), world.size)]
    plain = PlainDeepSpeed(task, run.task, of_rank, "bf16", stage=int(run.preset.removeprefix("zero")))
    steps = []
    for _ in range(STEPS):
        before = read_counts()
        plain()
        steps.append(_difference(before, read_counts()))
    return {"step": _largest(steps[FIRST_COUNTED - 1 :])}


def _count_trl(run: CountedRun, recipe: Path) -> dict[str, Counts]:
    """Train with TRL's trainer, and count between the beginnings of steps; it logs in none of them."""
    from transformers import TrainerCallback

    from benchmarks.trl_side import DPO, REWARD, SFT, made_side, ordered

    begun: list[Counts] = []

    class CountSteps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(read_counts())

    task = _make_task(recipe)
    trainer = {"sft": SFT, "rm": REWARD, "dpo": DPO}[run.task]
    side = made_side(trainer, task, ordered(task), use_cpu=False, bf16=True, logging_steps=10 * STEPS)
    side.trainer.add_callback(CountSteps())
    side.trainer.train()
    steps = [_difference(first, second) for first, second in pairwise(begun)]
    return {"step": _largest(steps[FIRST_COUNTED - 1 :])}


def why_no_trl() -> str:
    """Return why TRL cannot be counted; "" where it can."""
    if importlib.util.find_spec("trl") is None:
        return "not installed"
    try:
        import trl  # noqa: F401
    except ImportError as error:
        return f"cannot be imported: {error}"
    return ""


def _free_port() -> int:
    from dstrain.launch.probe import free_port

    return free_port()


def _difference(before: Counts, after: Counts) -> Counts:
    return {name: after[name] - before[name] for name in after}


def _sum(first: Counts, second: Counts) -> Counts:
    return {name: first[name] + second[name] for name in first}


def _largest(counts: Sequence[Counts]) -> Counts:
    return {name: max(each[name] for each in counts) for name in counts[0]}


PRESETS = ("zero0", "zero1", "zero2", "zero3")
COMPARED = ("sft", "rm", "dpo")
"""Tasks that are also counted with other programs."""
TASKS = (*COMPARED, "kto", "prm", "vlm", "docqa", "temporal", "protein")


def all_runs(with_trl: bool) -> list[CountedRun]:
    """Return the runs of the table."""
    runs = [CountedRun(task, "-", program=TRL) for task in COMPARED if with_trl]
    runs += [CountedRun(task, program=PLAIN) for task in COMPARED]
    runs += [CountedRun(task) for task in TASKS]
    for preset in PRESETS:
        if preset != "zero2":
            runs += [CountedRun("sft", preset, program=program) for program in (PLAIN, DSTRAIN)]
    runs.append(CountedRun("sft", changes={"model": {"lora": {"rank": 4, "alpha": 8}}}))
    for preset in PRESETS:
        runs += [CountedRun("sft", preset, program=program, processes=2) for program in (PLAIN, DSTRAIN)]
    return runs


def rows_of(run: CountedRun) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run: its step, of sft each further micro-batch, a log row and an evaluation."""
    counts = count_run(run)
    label = run.name + (", LoRA" if "model" in run.changes else "")
    if run.task == "sft" and run.program == DSTRAIN:
        many = replace(run, micro_batches=SAMPLES)
        further = count_run(many)["step"]
        counts["further micro-batch"] = {
            name: round((further[name] - counts["step"][name]) / (SAMPLES - 1), 1) for name in further
        }
    for part in ("step", "further micro-batch", "log row", "evaluation"):
        if part in counts:
            counted = {name: counts[part][name] for name in SHOWN}
            yield {"run": label, "processes": run.processes, "preset": run.preset, "of": part, **counted}


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
    obstacle = why_no_trl()
    for run in all_runs(with_trl=not obstacle):
        if wanted is None or run.task in wanted:
            rows += rows_of(run)
    chosen = "" if options.tasks is None else f" --tasks {options.tasks}"
    command = f"EMU_GPUS=2 python -m tools.cuda_emulator python -m benchmarks.device_counts{chosen}"
    versions = certificate()["versions"] | {"trl": obstacle or version("trl")}
    record = format_certificate(command=command, versions=versions)
    write_table(f"{record}\n\n{table(rows)}", "benchmarks.device_counts", options.to)


if __name__ == "__main__":
    main()
