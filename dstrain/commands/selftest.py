"""dstrain selftest: short real jobs on this machine, and what its environment offers."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from dstrain.commands.environment import EnvironmentLine
from dstrain.commands.evaluate import EvaluateJob
from dstrain.commands.recipe_args import RECIPES_DIR, TrainRequest, resolve_recipe
from dstrain.commands.run_job import SINGLE_WORKER, make_scratch, make_scratch_path
from dstrain.commands.trained_model import ModelSelector
from dstrain.config import RunConfig
from dstrain.errors import EXIT_DONE, EXIT_STOPPED, PeerFailureError, SelftestError, UsageError
from dstrain.files import atomic_write
from dstrain.launch.topology import visible_gpus, worker_from_env
from dstrain.preset import Device, preset_names, read_preset
from dstrain.report.run_log import read_rows

if TYPE_CHECKING:
    from dstrain.distributed.world import World


Phase = Literal["stop", "resume"]
State = Literal["ok", "failed", "skipped"]

CHECKS: Mapping[Phase, tuple[str, ...]] = {
    "stop": ("train", "stop"),
    "resume": ("resume", "losses", "export", "evaluate"),
}
"""Checks of each launch, in their order. The second launch has another number of processes."""
STEPS, STOP_AFTER = 8, 3
"""Steps of a run, and the step whose row sends the stop signal."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss, in fp32: other numbers of processes add in another order."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one check of one preset."""

    preset: str
    check: str
    state: State
    detail: str = ""
    """A measured value of a check that passed, or why one failed or was skipped."""
    fix: str = ""
    """What to do; empty for a check that passed."""
    seconds: float = 0.0


def skip(preset: str, checks: Sequence[str], reason: str) -> list[CheckResult]:
    """Return results of checks that another failure made impossible."""
    return [CheckResult(preset=preset, check=check, state="skipped", detail=reason) for check in checks]


def result_path(folder: Path, phase: Phase, preset: str) -> Path:
    """Return the file with a preset's results of a launch; `preset` may be the path of a JSON."""
    return folder / "results" / f"{phase}-{run_name(preset)}.json"


def error_path(folder: Path, phase: Phase, preset: str, rank: int) -> Path:
    """Return the file with the error that ended a rank in a preset's checks."""
    return folder / "results" / f"{phase}-{run_name(preset)}-rank{rank}.txt"


def run_name(preset: str) -> str:
    """Return the preset as part of a file name: of a path the name without .json."""
    return Path(preset).name.removesuffix(".json")


def write_results(path: Path, results: Sequence[CheckResult]) -> None:
    """Write the results, whole or not at all: the launching process reads them while others are written."""
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps([asdict(result) for result in results]))


def read_results(path: Path) -> list[CheckResult]:
    """Return the results in a file; none if it does not exist."""
    if not path.is_file():
        return []
    return [CheckResult(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def compare_losses(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Compare the metrics of a resumed run with those of an unbroken run, row by row.

    Returns (largest relative difference of a loss, a sentence on what differs too much; empty if nothing does).
    """
    mine, theirs = (_losses(each) for each in (rows, baseline))
    if mine.keys() != theirs.keys() or not theirs:
        return float("inf"), f"its rows are {_names(mine)}, those of the unbroken run {_names(theirs)}"
    worst, where = 0.0, next(iter(theirs))
    for key, expected in theirs.items():
        difference = abs(mine[key] - expected) / max(abs(expected), 1e-12)
        if not difference <= worst:  # also a nan
            worst, where = difference, key
    if worst <= TOLERANCE:
        return worst, ""
    return worst, (
        f"the {where[0]} loss of step {where[1]} is {mine[where]:.8g}, that of the unbroken run {theirs[where]:.8g}: "
        f"a relative difference of {worst:.2g}, and rounding explains up to {TOLERANCE:g}"
    )


def _losses(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Return the losses by split and step; a loss that is not finite is written as null."""
    return {
        (str(row["split"]), int(row["step"])): float("nan") if row["loss"] is None else float(row["loss"])
        for row in rows
    }


def _names(losses: Mapping[tuple[str, int], float]) -> str:
    return ", ".join(f"{split} {step}" for split, step in losses) or "none"


# Importing torch and DeepSpeed takes longer than a run, so a launch is shared by all presets. An exception ends the
# launch, since the other ranks wait in a collective; the next launch continues behind the preset that failed.


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
        from dstrain.train.build_run import build_run
        from dstrain.train.health.signals import SignalHandler
        from dstrain.train.plan import make_plan
        from dstrain.train.run import train
        from dstrain.train.start import ResumeOptions
        from dstrain.train.startup import finish_run

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
    from dstrain.train.plan import get_preset_device

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


WIDTH = 100
COLUMNS = tuple(check for checks in CHECKS.values() for check in checks)


@dataclass(frozen=True, kw_only=True)
class SelftestReport:
    """Everything that a selftest has found."""

    environment: Sequence[EnvironmentLine]
    processes: tuple[str, str]
    """The processes of both launches, such as `2 processes on the CPU`."""
    results: Sequence[CheckResult]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return bool(self.results) and all(result.state == "ok" for result in self.results)


def show_report(report: SelftestReport) -> str:
    """Return the table, a paragraph per failure, and a summary. The environment is not in it."""
    presets = list(dict.fromkeys(result.preset for result in report.results))
    found = {(result.preset, result.check): result for result in report.results}
    width = max(map(len, [*presets, "preset"]))
    lines = ["  ".join([f"{'preset':{width}}", *(f"{column:8}" for column in COLUMNS)]).rstrip()]
    for preset in presets:
        cells = [_cell(found.get((preset, column))) for column in COLUMNS]
        lines.append("  ".join([f"{preset:{width}}", *(f"{cell:8}" for cell in cells)]).rstrip())
    failures = [result for result in report.results if result.state == "failed"]
    for failure in failures:
        lines += ["", *_describe_failure(failure)]
    return "\n".join([*lines, "", _summary(report, len(failures))])


def _cell(result: CheckResult | None) -> str:
    """Return a check as a cell: the difference that was measured, ok, FAILED, or - where it was not made."""
    if result is None or result.state == "skipped":
        return "-"
    return "FAILED" if result.state == "failed" else result.detail or "ok"


def _describe_failure(failure: CheckResult) -> list[str]:
    text = [f"{failure.preset}, {failure.check}:", *failure.detail.splitlines()]
    reason = textwrap.wrap(" ".join(text), WIDTH, subsequent_indent="  ", break_long_words=False)
    fix = textwrap.wrap(f"what to do: {failure.fix}", WIDTH - 2, subsequent_indent="  ", break_long_words=False)
    return [*reason, *(f"  {line}" for line in fix)]


def _summary(report: SelftestReport, failures: int) -> str:
    first, second = report.processes
    how = f"trained with {first}, resumed with {second}; losses may differ by {TOLERANCE:g}, relatively"
    verdict = "passed" if report.passed else f"{failures} check{'s' * (failures != 1)} failed"
    return "\n".join([f"{how}", f"selftest: {verdict} in {report.seconds:.0f} s"])


def report_as_json(report: SelftestReport) -> str:
    """Return all results and the environment as JSON."""
    values = {
        "passed": report.passed,
        "environment": [asdict(line) for line in report.environment],
        "processes": list(report.processes),
        "tolerance": TOLERANCE,
        "results": [asdict(result) for result in report.results],
        "seconds": round(report.seconds, 1),
    }
    return json.dumps(values, indent=2)


# Both launches are children of this process, so that a rank that crashes or hangs costs the checks of one preset: the
# launch is then repeated with the presets behind it. All that they write lies in one folder: runs, cache, logs.


SAMPLES = {"train": 48, "eval": 16}
"""Records of the demo's files that are used: the tokenizer is trained on them, too."""
LAUNCH_TIMEOUT_SECONDS = 900.0
"""Longest time of a launch; a rank that hangs is found earlier, by `timeout_minutes`."""
KILL_GRACE_SECONDS = 10.0
LOGS_KEPT = "the logs of the processes are kept in"
"""Part of a line about a folder that is removed with the selftest's."""


@dataclass(frozen=True)
class Processes:
    """Processes of a launch."""

    count: int
    use_cpu: bool

    def __str__(self) -> str:
        return f"{self.count} process{'es' * (self.count > 1)} on {'the CPU' if self.use_cpu else 'GPUs'}"


def plan_processes(gpus: int) -> tuple[Processes, Processes]:
    """Return the processes of the first launch and those of the second, another number: one per GPU, 2 and 1 on a CPU.

    NCCL does not allow two processes on one GPU, so a run of one GPU is resumed by two processes on the CPU.
    """
    if gpus >= 2:
        return Processes(gpus, False), Processes(gpus // 2, False)
    return (Processes(1, False), Processes(2, True)) if gpus else (Processes(2, True), Processes(1, True))


@contextlib.contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """Yield a temporary folder that is removed at the end, or the folder that the user wants to keep.

    Raises UsageError if that one cannot be created or is not empty.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            used = any(keep.iterdir())
        except OSError as error:
            raise UsageError(f"--keep {keep}: cannot be used ({error.strerror}); choose another folder") from None
        if used:
            raise UsageError(f"--keep {keep}: is not empty; choose another folder")
        yield keep.resolve()
        return
    folder = make_scratch_path()
    make_scratch(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_selftest(presets: Sequence[str], folder: Path, report_line: Callable[[str], None]) -> SelftestReport:
    """Run all checks of the presets; `report_line` gets a sentence before each launch. Raises UsageError."""
    _check_request(presets)
    start = time.monotonic()
    first, second = plan_processes(visible_gpus(os.environ))
    _write_data(folder)
    batch = max(8, 2 * first.count)
    results: list[CheckResult] = []
    left = list(presets)
    for phase, processes in zip(CHECKS, (first, second), strict=True):
        found = LaunchSequence(phase, processes, folder, batch).run(left, report_line)
        results += found
        left = [preset for preset in left if all(row.state == "ok" for row in found if row.preset == preset)]
    done = {(row.preset, row.check) for row in results}
    for checks in CHECKS.values():
        for preset in presets:
            results += skip(
                preset, [check for check in checks if (preset, check) not in done], "an earlier check failed"
            )
    order = {preset: index for index, preset in enumerate(presets)}
    return SelftestReport(
        environment=(),
        processes=(str(first), str(second)),
        results=sorted(results, key=lambda row: order[row.preset]),
        seconds=time.monotonic() - start,
    )


def _check_request(presets: Sequence[str]) -> None:
    if (worker := worker_from_env(os.environ)) is not None:
        raise UsageError(
            f"selftest starts its own processes, and {worker.launcher} has started this one; start it alone"
        )
    names = [run_name(preset) for preset in presets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--preset {twice}: is given twice; remove one")
    for preset in presets:
        if preset not in preset_names() and not Path(preset).exists():
            read_preset(preset)  # says which names there are; a file that is wrong fails alone


def _write_data(folder: Path) -> None:
    for split, count in SAMPLES.items():
        lines = (RECIPES_DIR / RECIPE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@dataclass(frozen=True)
class LaunchSequence:
    """The launches of one phase: one if all goes well, and one more after each preset that ended it."""

    phase: Phase
    processes: Processes
    folder: Path
    batch: int

    def run(self, presets: Sequence[str], report_line: Callable[[str], None]) -> list[CheckResult]:
        """Return the results of the presets."""
        results: list[CheckResult] = []
        left = list(presets)
        while left:
            action = "train and stop" if self.phase == "stop" else "resume, export and evaluate"
            report_line(f"{self.processes}: {action} with {', '.join(left)}")
            problem = self._launch(left)
            while left and (found := read_results(result_path(self.folder, self.phase, left[0]))):
                results += found
                del left[0]
            if left:
                results += self._explain(left.pop(0), problem)
        return results

    def _launch(self, presets: Sequence[str]) -> str:
        """Run a launch to its end; return what is known of a failure."""
        command = [sys.executable, "-P", "-m", "dstrain.cli", "selftest", "--phase", self.phase]
        command += ["--keep", str(self.folder), "--batch", str(self.batch), "--processes", str(self.processes.count)]
        command += [word for preset in presets for word in ("--preset", preset)]
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{self.phase}-{len([*logs.iterdir()])}.log"
        with log.open("wb") as opened:
            code = run_child(command, self._environment(), opened.fileno())
        if code == 0:
            return ""
        reason = find_reason(log.read_text(encoding="utf-8", errors="replace"))
        how = f"exit code {code}" if code is not None else f"no end within {LAUNCH_TIMEOUT_SECONDS / 60:g} minutes"
        return f"the processes ended with {how}: {reason}"

    def _environment(self) -> Mapping[str, str]:
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "DSTRAIN_CACHE": str(self.folder / "cache")}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return env | ({"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if self.processes.use_cpu else {})

    def _explain(self, preset: str, problem: str) -> list[CheckResult]:
        """Return the results of a preset that ended its launch: by the error of the lowest rank that wrote one."""
        paths = (error_path(self.folder, self.phase, preset, rank) for rank in range(self.processes.count))
        error = next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), "")
        checks = CHECKS[self.phase]
        detail = error or problem or "the processes ended without a result"
        failed = CheckResult(
            preset=preset, check=checks[0], state="failed", detail=detail, fix=suggest_fix(checks[0], preset)
        )
        return [failed, *skip(preset, checks[1:], f"{checks[0]} failed")]


def find_reason(log: str) -> str:
    """Return the line of a launch's output that says why it failed: the last error of dstrain, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and LOGS_KEPT not in line]
    errors = [line for line in lines if line.startswith(("dstrain: ", "error: "))]
    return next(iter([*errors[-1:], *lines[-1:]]), "they have printed nothing")


def run_child(command: Sequence[str], env: Mapping[str, str], output: int) -> int | None:
    """Run a command to its end; return its exit code, None if it took too long.

    A signal that ends this process ends the child first: SIGTERM and SIGHUP raise KeyboardInterrupt inside.
    """
    with _handle_signals():
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            return child.wait(LAUNCH_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs: by SIGTERM, on which it ends its workers, then by SIGKILL."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_GRACE_SECONDS)
    if child.poll() is None:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _handle_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP inside, too. An ignored signal stays ignored, for nohup."""

    def on_signal(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
