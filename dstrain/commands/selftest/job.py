"""Worker side of the selftest: one launch takes the runs of every preset in the same processes."""

# Importing torch and DeepSpeed takes longer than a run, so a launch is shared by all presets. An exception ends the
# launch, since the other ranks wait in a collective; the next launch continues behind the preset that failed.

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dstrain.commands.evaluate import EvaluateJob
from dstrain.commands.job.run_job import SINGLE_WORKER
from dstrain.commands.models.trained_model import ModelSelector
from dstrain.commands.recipe.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.selftest.checks import (
    CHECKS,
    STEPS,
    STOP_AFTER,
    TOLERANCE,
    CheckResult,
    Phase,
    compare_losses,
    error_path,
    result_path,
    run_name,
    skip,
    write_results,
)
from dstrain.config import RunConfig
from dstrain.errors import EXIT_DONE, EXIT_STOPPED, PeerFailureError, SelftestError, UsageError
from dstrain.launch.topology import worker_from_env
from dstrain.preset import Device
from dstrain.report.run_log import read_rows

if TYPE_CHECKING:
    from dstrain.distributed.world import World

RECIPE = "demo-rm"


@dataclass(frozen=True)
class PreparedSelftest:
    """Nothing is prepared: each run makes its own DeepSpeed JSON."""

    ds_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SelftestJob:
    """A job with the runs of one launch: unbroken and stopped ones, or their resumption, export and evaluation."""

    phase: Phase
    folder: Path
    presets: Sequence[str]
    batch: int
    """Samples of an optimizer step."""
    is_parallel = True
    trains = True

    def to_argv(self) -> list[str]:
        words = ["selftest", "--phase", self.phase, "--keep", str(self.folder), "--batch", str(self.batch)]
        return [*words, *(word for preset in self.presets for word in ("--preset", preset))]

    def check_recipe(self) -> RunConfig:
        return resolve_recipe(self._request(None, "unused")).config

    def _request(self, preset: str | None, run: str) -> TrainRequest:
        data = {split: str(self.folder / f"{split}.jsonl") for split in ("train", "eval")}
        return TrainRequest(
            recipe=RECIPE,
            ds_config=preset,
            run_dir=self.folder / run,
            overrides=[
                f"data={json.dumps({**data, 'max_length': 96, 'workers': 0})}",
                "model.config.num_hidden_layers=2", "model.config.hidden_size=64", f"steps={STEPS}", "precision=fp32",
                f"batch={{total: {self.batch}, micro: 2}}", "optim.warmup=0", "log={every: 1, tensorboard: false}",
                f"eval.every={STEPS}", "save={every: 1000, keep: 1}", "timeout_minutes=5",
            ],
        )  # fmt: skip

    def prepare(self, world_size: int, device: Device) -> PreparedSelftest:
        return PreparedSelftest()

    def cache_weight_hashes(self, prepared: PreparedSelftest) -> None:
        """Do nothing: the recipe has neither adapters nor a reference."""

    def run(self, prepared: PreparedSelftest, world: World) -> int:
        for preset in self.presets:
            try:
                results = self._check_preset(preset, world)
            except Exception as error:
                self._record_error(preset, world.rank, error)
            if world.rank == 0:
                write_results(result_path(self.folder, self.phase, preset), results)
            world.barrier()
            gc.collect()  # engines are in reference cycles
        return len(self.presets)

    def _record_error(self, preset: str, rank: int, error: Exception) -> NoReturn:
        if not isinstance(error, PeerFailureError):  # which only follows from another rank's error
            path = error_path(self.folder, self.phase, preset, rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(error) or type(error).__name__, encoding="utf-8")
        raise error

    def _check_preset(self, preset: str, world: World) -> list[CheckResult]:
        """Run the checks of this launch for a preset, until one fails. Collective."""
        checks = {
            "train": self._check_train, "stop": self._check_stop, "resume": self._check_resume,
            "losses": self._check_losses, "export": self._check_export, "evaluate": self._check_evaluate,
        }  # fmt: skip
        results: list[CheckResult] = []
        names = CHECKS[self.phase]
        for index, name in enumerate(names):
            start = time.perf_counter()
            try:
                detail = checks[name](preset, world)
                failure: UsageError | SelftestError | None = None
            except (UsageError, SelftestError) as error:  # found alike by all ranks
                detail, failure = str(error), error
            fix = "" if failure is None else suggest_fix(name, preset)
            results.append(
                CheckResult(
                    preset=preset, check=name, state="failed" if failure else "ok", detail=detail, fix=fix,
                    seconds=time.perf_counter() - start,
                )
            )  # fmt: skip
            if failure is not None:
                return [*results, *skip(preset, names[index + 1 :], f"{name} failed")]
        return results

    def _check_train(self, preset: str, world: World) -> str:
        _expect(self._train(preset, "unbroken", world), EXIT_DONE)
        return ""

    def _check_stop(self, preset: str, world: World) -> str:
        _expect(self._train(preset, "stopped", world, stop_after=STOP_AFTER), EXIT_STOPPED)
        return ""

    def _check_resume(self, preset: str, world: World) -> str:
        _expect(self._train(preset, "stopped", world), EXIT_DONE)
        return ""

    def _check_losses(self, preset: str, world: World) -> str:
        rows = [read_rows(self._run_dir(preset, run) / "metrics.jsonl") for run in ("stopped", "unbroken")]
        difference, problem = compare_losses(*rows)
        _raise_on_all_ranks(world, problem)
        return f"{difference:.1e}"

    def _check_export(self, preset: str, world: World) -> str:
        from dstrain.commands.export import export_model

        problem = ""
        if world.rank == 0:
            try:
                export_model(self._run_dir(preset, "stopped"), "last", self._run_dir(preset, "export"))
            except Exception as error:
                problem = str(error)
        _raise_on_all_ranks(world, problem)
        return ""

    def _check_evaluate(self, preset: str, world: World) -> str:
        """Evaluate the export, whose loss must be the one that the run has measured last. Collective."""
        selector = ModelSelector(folder=self._run_dir(preset, "export"))
        job = EvaluateJob(selector=selector, data=str(self.folder / "eval.jsonl"))
        loss = job.run(job.prepare(world.size, _device(world)), world)["loss"]
        rows = read_rows(self._run_dir(preset, "stopped") / "metrics.jsonl")
        expected = [row["loss"] for row in rows if row["split"] == "eval"][-1]
        difference = abs(loss - expected) / abs(expected)
        problem = f"the export's loss is {loss:.8g}, the run has measured {expected:.8g} with the same weights"
        _raise_on_all_ranks(world, "" if difference <= TOLERANCE else problem)
        return f"{difference:.1e}"

    def _run_dir(self, preset: str, run: str) -> Path:
        return self.folder / f"{run_name(preset)}-{run}"

    def _train(self, preset: str, run: str, world: World, stop_after: int | None = None) -> int:
        """Train or resume one run; return its exit code. Collective."""
        from dstrain.train.health.signals import SignalHandler
        from dstrain.train.loop import train
        from dstrain.train.resume.recorded import ResumeOptions
        from dstrain.train.setup.build_run import build_run
        from dstrain.train.setup.plan import make_plan
        from dstrain.train.setup.startup import finish_run

        recipe = resolve_recipe(self._request(preset, self._run_dir(preset, run).name))
        worker = worker_from_env(os.environ) or SINGLE_WORKER
        plan = _on_all_ranks(
            world, lambda: make_plan(recipe, self._run_dir(preset, run), ResumeOptions("auto"), worker)
        )
        with SignalHandler() as signal_handler:
            made = build_run(plan, world, None, signal_handler)
            if stop_after is not None and world.rank == 0:
                made = replace(made, sinks=[*made.sinks, StopSink(stop_after)])
            try:
                return finish_run(made, train(made).step)
            finally:
                for sink in made.sinks:
                    sink.close()
                made.run_log.close()


class StopSink:
    """Sink that sends SIGTERM to its own process, as a scheduler does, after the row of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def write(self, row: Mapping[str, Any]) -> None:
        if row["split"] == "train" and row["step"] == self._step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, exit_code: int = 0) -> None:
        """Do nothing: there is nothing to flush."""


def _on_all_ranks(world: World, make: Callable[[], Any]) -> Any:
    """Return what `make` returns; it has no collective. Raises UsageError on all ranks if one raised it. Collective."""
    made, problem = None, ""
    try:
        made = make()
    except UsageError as error:
        problem = str(error)
    _raise_on_all_ranks(world, problem, UsageError)
    return made


def _raise_on_all_ranks(world: World, problem: str, error: type[UsageError | SelftestError] = SelftestError) -> None:
    """Raise the error on every rank if any rank has a problem. Collective."""
    if found := next(filter(None, world.gather(problem)), ""):
        raise error(found)


def _expect(code: int, expected: int) -> None:
    """Raise SelftestError for another exit code; it is the same on all ranks."""
    if code != expected:
        raise SelftestError(f"the run ended with exit code {code} instead of {expected}")


def _device(world: World) -> Device:
    from dstrain.train.setup.plan import get_preset_device

    return get_preset_device(world.device)


_LOGS = "run the selftest again with --keep DIR and read DIR/logs"
FIXES: Mapping[str, str] = {
    "train": f"`dstrain train {RECIPE} --ds-config PRESET` shows this preset alone; {_LOGS}",
    "stop": f"a job that is stopped here would lose its last steps: check the disk and its free space; {_LOGS}",
    "resume": f"do not rely on checkpoints of this machine before this is solved: check disk and memory; {_LOGS}",
    "losses": "check the devices for memory errors (nvidia-smi -q); if there are none, report it with the files of --keep",
    "export": f"check free disk space and the version of transformers; {_LOGS}",
    "evaluate": f"do not use exports of this machine before this is solved; {_LOGS}",
}
"""What to do for a check that failed, beside what its own message says."""


def suggest_fix(check: str, preset: str) -> str:
    """Return what to do for a failed check of a preset."""
    return FIXES[check].replace("PRESET", preset)
