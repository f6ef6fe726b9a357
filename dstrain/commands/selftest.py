"""dstrain selftest: short real jobs on this machine, and what its environment offers."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrain.commands.environment import EnvironmentLine
from dstrain.commands.evaluate import EvaluateJob
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.run_job import SINGLE_WORKER, Job, Prepared, scratch_folder
from dstrain.commands.trained_model import ModelSelector
from dstrain.config import RunConfig
from dstrain.config.aliases import RECIPES_DIR
from dstrain.errors import EXIT_DONE, EXIT_STOPPED, SelftestError, UsageError
from dstrain.launch.command import rank_command
from dstrain.launch.topology import visible_gpus, worker_from_env
from dstrain.preset import preset_names, read_preset
from dstrain.report.run_log import read_rows

if TYPE_CHECKING:
    from dstrain.distributed.world import World


Phase = Literal["stop", "resume"]

RECIPE = "demo-rm"
SAMPLES = {"train": 48, "eval": 16}
"""Records of the demo's files that are used: the tokenizer is trained on them, too."""
STEPS, STOP_AFTER = 8, 3
"""Steps of a run, and the step whose row sends the stop signal."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss, in fp32: other numbers of processes add in another order."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one check of one preset."""

    preset: str
    check: str
    state: Literal["ok", "failed", "skipped"]
    detail: str = ""
    """A measured value of a check that passed, or why one failed or was skipped."""
    fix: str = ""
    """What to do; empty for a check that passed."""
    seconds: float = 0.0


def run_name(preset: str) -> str:
    """Return the preset as part of a file name: of a path the name without .json."""
    return Path(preset).name.removesuffix(".json")


# The checks, inside the processes of a launch. All ranks find the same result of each.


@dataclass(frozen=True)
class PresetRuns:
    """The runs of one preset."""

    preset: str
    job: SelftestJob
    world: World

    def get_dir(self, run: str) -> Path:
        return self.job.folder / f"{run_name(self.preset)}-{run}"

    def read_metrics(self, run: str) -> list[dict[str, Any]]:
        return read_rows(self.get_dir(run) / "metrics.jsonl")

    def raise_on_all_ranks(self, problem: str, error: type[UsageError | SelftestError] = SelftestError) -> None:
        """Raise the error on every rank if any rank has a problem. Collective."""
        if found := next(filter(None, self.world.gather(problem)), ""):
            raise error(found)

    def train(self, run: str, expected: int, stop_after: int | None = None) -> str:
        """Train or resume one run. Raises SelftestError for an exit code that is not expected. Collective."""
        from dstrain.training.build_run import build_run
        from dstrain.training.health.signals import SignalHandler
        from dstrain.training.messages import finish_run
        from dstrain.training.plan import make_plan
        from dstrain.training.run import train
        from dstrain.training.start import ResumeOptions

        plan, problem = None, ""
        try:
            recipe = resolve_recipe(self.job.make_request(self.preset, run))
            worker = worker_from_env(os.environ) or SINGLE_WORKER
            plan = make_plan(recipe, self.get_dir(run), ResumeOptions("auto"), worker)
        except UsageError as error:
            problem = str(error)
        self.raise_on_all_ranks(problem, UsageError)
        assert plan is not None
        with SignalHandler() as signal_handler:
            made = build_run(plan, self.world, None, signal_handler)
            if stop_after is not None and self.world.rank == 0:
                made = replace(made, sinks=[*made.sinks, StopSink(stop_after)])
            try:
                code = finish_run(made, train(made).step)
            finally:
                for sink in made.sinks:
                    sink.close()
                made.run_log.close()
        if code != expected:
            raise SelftestError(f"the run ended with exit code {code} instead of {expected}")
        return ""


class StopSink:
    """Sink that sends SIGTERM to its own process, as a scheduler does, after the row of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def write(self, row: Mapping[str, Any]) -> None:
        if row["split"] == "train" and row["step"] == self._step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, exit_code: int = 0) -> None:
        """Do nothing: there is nothing to flush."""


def check_losses(runs: PresetRuns) -> str:
    """Compare the losses of the resumed run with those of the unbroken one. Collective."""
    difference, problem = compare_losses(runs.read_metrics("stopped"), runs.read_metrics("unbroken"))
    runs.raise_on_all_ranks(problem)
    return f"{difference:.1e}"


def check_export(runs: PresetRuns) -> str:
    """Export the resumed run by rank 0. Collective."""
    from dstrain.commands.export import export_model

    problem = ""
    if runs.world.rank == 0:
        try:
            export_model(runs.get_dir("stopped"), "last", runs.get_dir("export"))
        except Exception as error:
            problem = str(error)
    runs.raise_on_all_ranks(problem)
    return ""


def check_evaluate(runs: PresetRuns) -> str:
    """Evaluate the export, whose loss must be the one that the run has measured last. Collective."""
    from dstrain.training.plan import get_preset_device

    world = runs.world
    job = EvaluateJob(selector=ModelSelector(folder=runs.get_dir("export")), data=str(runs.job.folder / "eval.jsonl"))
    loss = job.run(job.prepare(world.size, get_preset_device(world.device)), world)["loss"]
    expected = [row["loss"] for row in runs.read_metrics("stopped") if row["split"] == "eval"][-1]
    difference = abs(loss - expected) / abs(expected)
    problem = f"the export's loss is {loss:.8g}, the run has measured {expected:.8g} with the same weights"
    runs.raise_on_all_ranks("" if difference <= TOLERANCE else problem)
    return f"{difference:.1e}"


_LOGS = "run the selftest again with --keep DIR and read DIR/logs"
CHECKS: Mapping[Phase, Mapping[str, tuple[Callable[[PresetRuns], str], str]]] = {
    "stop": {
        "train": (
            lambda runs: runs.train("unbroken", EXIT_DONE),
            f"`dstrain train {RECIPE} --ds-config PRESET` shows this preset alone; {_LOGS}",
        ),
        "stop": (
            lambda runs: runs.train("stopped", EXIT_STOPPED, STOP_AFTER),
            f"a job that is stopped here would lose its last steps: check the disk and its free space; {_LOGS}",
        ),
    },
    "resume": {
        "resume": (
            lambda runs: runs.train("stopped", EXIT_DONE),
            f"do not rely on checkpoints of this machine before this is solved: check disk and memory; {_LOGS}",
        ),
        "losses": (
            check_losses,
            "check the devices for memory errors (nvidia-smi -q); if there are none, report it with the files of --keep",
        ),
        "export": (check_export, f"check free disk space and the version of transformers; {_LOGS}"),
        "evaluate": (check_evaluate, f"do not use exports of this machine before this is solved; {_LOGS}"),
    },
}
"""Launch -> check -> (function that returns a measured value or raises, fix of a failure), in their order. The second
launch has another number of processes."""
COLUMNS = tuple(check for checks in CHECKS.values() for check in checks)


def fail(phase: Phase, check: str, preset: str, detail: str, seconds: float = 0.0) -> CheckResult:
    """Return the result of a failed check, with its fix."""
    fix = CHECKS[phase][check][1].replace("PRESET", preset)
    return CheckResult(preset=preset, check=check, state="failed", detail=detail, fix=fix, seconds=seconds)


def compare_losses(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Compare the metrics of a resumed run with those of an unbroken run, row by row.

    Returns (largest relative difference of a loss, a sentence on what differs too much; empty if nothing does). A
    loss that is not finite is null in the rows.
    """
    mine, theirs = (
        {(row["split"], row["step"]): math.nan if row["loss"] is None else float(row["loss"]) for row in each}
        for each in (rows, baseline)
    )
    if mine.keys() != theirs.keys() or not theirs:
        names = [", ".join(f"{split} {step}" for split, step in losses) or "none" for losses in (mine, theirs)]
        return math.inf, f"its rows are {names[0]}, those of the unbroken run {names[1]}"
    differences = {key: abs(mine[key] - loss) / max(abs(loss), 1e-12) for key, loss in theirs.items()}
    where = max(differences, key=lambda key: math.inf if math.isnan(differences[key]) else differences[key])
    worst = differences[where]
    if worst <= TOLERANCE:
        return worst, ""
    return worst, (
        f"the {where[0]} loss of step {where[1]} is {mine[where]:.8g}, that of the unbroken run {theirs[where]:.8g}: "
        f"a relative difference of {worst:.2g}, and rounding explains up to {TOLERANCE:g}"
    )


# Importing torch and DeepSpeed takes longer than a run, so a launch is shared by all presets. Any other exception than
# those of a check ends the launch, since the other ranks wait in a collective.


@dataclass(frozen=True)
class SelftestJob(Job):
    """A job with the runs of one launch: unbroken and stopped ones, or their resumption, export and evaluation."""

    phase: Phase
    folder: Path
    presets: Sequence[str]
    batch: int
    """Samples of an optimizer step."""
    trains = True

    def to_argv(self) -> list[str]:
        words = ["selftest", "--phase", self.phase, "--keep", str(self.folder), "--batch", str(self.batch)]
        return [*words, *(word for preset in self.presets for word in ("--preset", preset))]

    def check_recipe(self) -> RunConfig:
        return resolve_recipe(self.make_request(None, "unused")).config

    def make_request(self, preset: str | None, run: str) -> TrainRequest:
        data = {split: str(self.folder / f"{split}.jsonl") for split in SAMPLES}
        return TrainRequest(
            recipe=RECIPE,
            ds_config=preset,
            run_dir=self.folder / f"{run_name(preset or '')}-{run}",
            overrides=[
                f"data={json.dumps({**data, 'max_length': 96, 'workers': 0})}",
                "model.config.num_hidden_layers=2", "model.config.hidden_size=64", f"steps={STEPS}", "precision=fp32",
                f"batch={{total: {self.batch}, micro: 2}}", "optim.warmup=0", "log={every: 1, tensorboard: false}",
                f"eval.every={STEPS}", "save={every: 1000, keep: 1}", "timeout_minutes=5",
            ],
        )  # fmt: skip

    def run(self, prepared: Prepared, world: World) -> int:
        for preset in self.presets:
            results = list(self._check_preset(PresetRuns(preset, self, world)))
            if world.rank == 0:
                append_results(self.folder, self.phase, results)
            world.barrier()
            gc.collect()  # engines are in reference cycles
        return len(self.presets)

    def _check_preset(self, runs: PresetRuns) -> Iterator[CheckResult]:
        """Yield the results of this launch for a preset, up to the first failure. Collective."""
        for name, (check, _) in CHECKS[self.phase].items():
            start = time.perf_counter()
            try:
                detail = check(runs)
            except (UsageError, SelftestError) as error:  # found alike by all ranks
                yield fail(self.phase, name, runs.preset, str(error), time.perf_counter() - start)
                return
            seconds = time.perf_counter() - start
            yield CheckResult(preset=runs.preset, check=name, state="ok", detail=detail, seconds=seconds)


def append_results(folder: Path, phase: Phase, results: Iterable[CheckResult]) -> None:
    """Append the results of a preset to the file of a launch."""
    with (folder / f"{phase}.jsonl").open("a", encoding="utf-8") as file:
        # Each on a new line, also behind half a line of a process that was killed.
        file.writelines(f"\n{json.dumps(asdict(result))}" for result in results)


def read_results(folder: Path, phase: Phase) -> list[CheckResult]:
    """Return the results in the file of a launch."""
    return [CheckResult(**row) for row in read_rows(folder / f"{phase}.jsonl")]


# Both launches are children of this process, so that a rank that crashes or hangs costs the checks of one preset: the
# launch is then repeated with the presets behind it. All that they write lies in one folder: runs, cache, logs.

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
    with scratch_folder() as folder:
        yield folder


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


def run_selftest(
    presets: Sequence[str],
    folder: Path,
    report_line: Callable[[str], None],
    environment: Sequence[EnvironmentLine] = (),
) -> SelftestReport:
    """Run all checks of the presets; `report_line` gets a sentence before each launch. Raises UsageError."""
    _check_request(presets)
    start = time.monotonic()
    first, second = plan_processes(visible_gpus(os.environ))
    for split, count in SAMPLES.items():
        lines = (RECIPES_DIR / RECIPE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    batch = max(8, 2 * first.count)
    results = run_phase(SelftestJob("stop", folder, presets, batch), first, report_line)
    failed = {result.preset for result in results if result.state == "failed"}
    intact = [preset for preset in presets if preset not in failed]
    results += run_phase(SelftestJob("resume", folder, intact, batch), second, report_line)
    return SelftestReport(
        environment=environment,
        processes=(str(first), str(second)),
        results=[result for preset in presets for result in with_skipped(preset, results)],
        seconds=time.monotonic() - start,
    )


def with_skipped(preset: str, results: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Yield a preset's result of every check: behind a failed one the others are skipped."""
    found = {result.check: result for result in results if result.preset == preset}
    failed = next((check for check, result in found.items() if result.state == "failed"), "an earlier check")
    for check in COLUMNS:
        skipped = CheckResult(preset=preset, check=check, state="skipped", detail=f"{failed} failed")
        yield found.get(check, skipped)


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


def run_phase(job: SelftestJob, processes: Processes, report_line: Callable[[str], None]) -> list[CheckResult]:
    """Launch the job once, and once more behind each preset that ended a launch. Returns the results."""
    left, results = list(job.presets), list[CheckResult]()
    while left:
        action = "train and stop" if job.phase == "stop" else "resume, export and evaluate"
        report_line(f"{processes}: {action} with {', '.join(left)}")
        problem = launch(replace(job, presets=left), processes)
        done = {result.preset for result in read_results(job.folder, job.phase)}
        left = [preset for preset in left if preset not in done]
        if left:
            detail = problem or "the processes ended without a result"
            append_results(job.folder, job.phase, [fail(job.phase, next(iter(CHECKS[job.phase])), left.pop(0), detail)])
        results = read_results(job.folder, job.phase)
    return results


def launch(job: SelftestJob, processes: Processes) -> str:
    """Run a launch to its end; return what is known of a failure."""
    command = rank_command([*job.to_argv(), "--processes", str(processes.count)])
    for name in ("tmp", "logs"):
        (job.folder / name).mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(job.folder / "tmp"), "DSTRAIN_CACHE": str(job.folder / "cache")}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if processes.use_cpu:
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    log = job.folder / "logs" / f"{job.phase}-{len([*(job.folder / 'logs').iterdir()])}.log"
    with log.open("wb") as opened:
        code = run_child(command, env, opened.fileno())
    if code == 0:
        return ""
    how = f"exit code {code}" if code is not None else f"no end within {LAUNCH_TIMEOUT_SECONDS / 60:g} minutes"
    return f"the processes ended with {how}: {find_reason(log.read_text(encoding='utf-8', errors='replace'))}"


def find_reason(log: str) -> str:
    """Return the line of a launch's output that says why it failed: the last error of dstrain, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and LOGS_KEPT not in line]
    errors = [line for line in lines if line.startswith(("dstrain: ", "error: "))]
    return next(iter([*errors[-1:], *lines[-1:]]), "they have printed nothing")


def run_child(command: Sequence[str], env: Mapping[str, str], output: int) -> int | None:
    """Run a command to its end; return its exit code, None if it took too long.

    A signal that ends this process ends the child first: SIGTERM and SIGHUP raise KeyboardInterrupt inside. An ignored
    signal stays ignored, for nohup.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    child = None
    try:
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        return child.wait(LAUNCH_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child is not None and child.poll() is None:
            child.terminate()  # on which it ends its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILL_GRACE_SECONDS)
            child.kill()  # does nothing to a child that has ended
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


WIDTH = 100


def show_report(report: SelftestReport) -> str:
    """Return the table, a paragraph per failure, and a summary. The environment is not in it."""
    presets = list(dict.fromkeys(result.preset for result in report.results))
    cells = {(result.preset, result.check): _cell(result) for result in report.results}
    width = max(map(len, [*presets, "preset"]))
    rows = [("preset", COLUMNS), *((preset, [cells[preset, column] for column in COLUMNS]) for preset in presets)]
    lines = ["  ".join([f"{name:{width}}", *(f"{cell:8}" for cell in row)]).rstrip() for name, row in rows]
    failures = [result for result in report.results if result.state == "failed"]
    for failure in failures:
        reason = " ".join([f"{failure.preset}, {failure.check}:", *failure.detail.splitlines()])
        lines += ["", *textwrap.wrap(reason, WIDTH, subsequent_indent="  ", break_long_words=False)]
        fix = f"what to do: {failure.fix}"
        lines += textwrap.wrap(fix, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    first, second = report.processes
    verdict = "passed" if report.passed else f"{len(failures)} check{'s' * (len(failures) != 1)} failed"
    return "\n".join([
        *lines, "",
        f"trained with {first}, resumed with {second}; losses may differ by {TOLERANCE:g}, relatively",
        f"selftest: {verdict} in {report.seconds:.0f} s",
    ])  # fmt: skip


def _cell(result: CheckResult) -> str:
    """Return a check as a cell: the difference that was measured, ok, FAILED, or - where it was not made."""
    return {"ok": result.detail or "ok", "failed": "FAILED", "skipped": "-"}[result.state]


def report_as_json(report: SelftestReport) -> str:
    """Return all results and the environment as JSON."""
    values = {"passed": report.passed, **asdict(report), "tolerance": TOLERANCE, "seconds": round(report.seconds, 1)}
    return json.dumps(values, indent=2)
