"""dstrain selftest: short real jobs on this machine, and what its environment offers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dstrain.commands.environment import EnvironmentLine
from dstrain.commands.run_job import scratch_folder
from dstrain.config.aliases import RECIPES_DIR
from dstrain.errors import EXIT_DONE, EXIT_STOPPED, SelftestError, UsageError
from dstrain.files import parse_json
from dstrain.launch.plan import rank_command
from dstrain.launch.topology import visible_gpus, worker_from_env
from dstrain.preset import preset_names, read_preset
from dstrain.process_setup import PARENT_ENV
from dstrain.report.run_log import read_rows

RECIPE = "demo-rm"
SAMPLES = {"train": 48, "eval": 16}
"""Records of the demo's files that are used: the tokenizer is trained on them, too."""
STEPS, STOP_AFTER = 40, 3
"""Steps of a run, and the step whose row is followed by the stop signal."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss, in fp32: other numbers of processes add in another order."""
REFERENCE = "zero0"
"""Preset of the run without a break, whose losses all presets must have."""

_LOGS = "run the selftest again with --keep DIR and read DIR/logs"
FIXES: Mapping[str, str] = {
    "train": (
        f"`dstrain train {RECIPE} --ds-config PRESET` shows this preset alone; if it trains, but does not stop with exit "
        f"code {EXIT_STOPPED}, check the disk and its free space; {_LOGS}"
    ),
    "resume": f"do not rely on checkpoints of this machine before this is solved: check disk and memory; {_LOGS}",
    "losses": (
        "check the devices for memory errors (nvidia-smi -q); if there are none, report it with the files of --keep"
    ),
    "export": f"check free disk space and the version of transformers; {_LOGS}",
    "evaluate": f"do not use exports of this machine before this is solved; {_LOGS}",
}
"""Check -> what to do if it fails, in the order of the checks."""
CHECKS = tuple(FIXES)


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


@dataclass(frozen=True)
class Processes:
    """Processes of a command."""

    count: int
    use_cpu: bool

    def __str__(self) -> str:
        return f"{self.count} process{'es' * (self.count > 1)} on {'the CPU' if self.use_cpu else 'GPUs'}"


def plan_processes(gpus: int) -> tuple[Processes, Processes]:
    """Return the processes that train and those that resume, another number: one per GPU, 2 and 1 on a CPU.

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
    """The processes that trained and those that resumed, such as `2 processes on the CPU`."""
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
    """Run all checks of the presets; `report_line` gets a sentence before each preset. Raises UsageError."""
    _check_request(presets)
    start = time.monotonic()
    first, second = plan_processes(visible_gpus(os.environ))
    for split, count in SAMPLES.items():
        lines = (RECIPES_DIR / RECIPE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    commands = Commands(folder, first, second)
    report_line(f"{first}: train without a break with {REFERENCE}")
    problem = ""
    try:
        commands.train(REFERENCE, "unbroken")
    except SelftestError as error:
        problem = f"the run without a break with {REFERENCE} failed: {error}"
    results: list[CheckResult] = []
    for preset in presets:
        report_line(f"{preset}: {first} train and stop, {second} resume, export and evaluate")
        results += check_preset(preset, commands, problem)
    return SelftestReport(
        environment=environment,
        processes=(str(first), str(second)),
        results=results,
        seconds=time.monotonic() - start,
    )


def _check_request(presets: Sequence[str]) -> None:
    """Raise UsageError for presets that do not exist or are given twice, and inside the launch of another program."""
    worker = worker_from_env(os.environ)
    if worker is not None:
        raise UsageError(
            f"dstrain selftest starts its own processes, and {worker.launcher} has started this one; start it alone"
        )
    names = [run_name(preset) for preset in presets]
    for preset in presets:
        if names.count(run_name(preset)) > 1:
            raise UsageError(f"--preset {preset}: is given twice; remove one")
        if preset not in preset_names() and not Path(preset).exists():
            read_preset(preset)  # says which names there are; a file that is wrong fails alone


def compare_losses(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Compare the metrics of a resumed run with those of an unbroken run, row by row.

    Returns (largest relative difference of a loss, a sentence on what differs too much; empty if nothing does). A
    loss that is not finite is null in the rows.
    """
    mine, theirs = _losses_by_row(rows), _losses_by_row(baseline)
    if mine.keys() != theirs.keys() or not theirs:
        names = [", ".join(f"{split} {step}" for split, step in losses) or "none" for losses in (mine, theirs)]
        return math.inf, f"its rows are {names[0]}, but the unbroken run has {names[1]}"
    differences = {key: abs(mine[key] - loss) / max(abs(loss), 1e-12) for key, loss in theirs.items()}
    where = max(differences, key=lambda key: math.inf if math.isnan(differences[key]) else differences[key])
    worst = differences[where]
    if worst <= TOLERANCE:
        return worst, ""
    return worst, (
        f"the {where[0]} loss of step {where[1]} is {mine[where]:.8g}, but {theirs[where]:.8g} in the unbroken run: "
        f"a relative difference of {worst:.2g}, and rounding explains up to {TOLERANCE:g}"
    )


def _losses_by_row(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    losses = {}
    for row in rows:
        losses[row["split"], row["step"]] = math.nan if row["loss"] is None else float(row["loss"])
    return losses


@dataclass(frozen=True)
class Commands:
    """The public commands that a selftest starts, one after the other. All that they write lies in one folder."""

    folder: Path
    first: Processes
    second: Processes

    def run_dir(self, preset: str, run: str) -> Path:
        return self.folder / f"{run_name(preset)}-{run}"

    def train(self, preset: str, run: str, *, stop: bool = False, resume: bool = False) -> None:
        """Train until the end, or until a signal after step STOP_AFTER stops the run."""
        processes = self.second if resume else self.first
        # At the demo's learning rate of 1e-3 Adam makes differences by rounding larger than TOLERANCE in 40 steps.
        data = {split: str(self.folder / f"{split}.jsonl") for split in SAMPLES}
        overrides = [
            f"data={json.dumps({**data, 'max_length': 96, 'workers': 0})}",
            "model.config.num_hidden_layers=2", "model.config.hidden_size=64", f"steps={STEPS}", "optim.lr=1.0e-4", "precision=fp32",
            f"batch={{total: {max(8, 2 * self.first.count)}, micro: 2}}", "optim.warmup=0",
            "log={every: 1, tensorboard: false}", f"eval.every={STEPS}", "save={every: 1000, keep: 1}",
            "timeout_minutes=5",
        ]  # fmt: skip
        run_dir = self.run_dir(preset, run)
        words = ["train", RECIPE, "--ds-config", preset, "--run-dir", str(run_dir)]
        for override in overrides:
            words += ["--set", override]
        signal_when = None
        if stop:
            signal_when = lambda: count_train_steps(run_dir) >= STOP_AFTER  # noqa: E731
        self.start(words, processes, EXIT_STOPPED if stop else EXIT_DONE, signal_when)

    def start(
        self,
        words: Sequence[str],
        processes: Processes | None = None,
        expected: int = EXIT_DONE,
        signal_when: Callable[[], bool] | None = None,
    ) -> str:
        """Run `dstrain WORDS` to its end and return its standard output. Raises SelftestError."""
        command = rank_command([*words, "--num-gpus", str(processes.count)] if processes else words)
        logs = self.folder / "logs"
        for folder in (self.folder / "tmp", logs):
            folder.mkdir(exist_ok=True)
        env = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "DSTRAIN_CACHE": str(self.folder / "cache")}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if (processes or self.second).use_cpu:
            env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        name = f"{len([*logs.glob('*.err')]):02}-{words[0]}"
        output, errors = logs / f"{name}.out", logs / f"{name}.err"
        with output.open("wb") as output_file, errors.open("wb") as error_file:
            code = run_child(command, env, output_file.fileno(), error_file.fileno(), signal_when)
        printed = output.read_text(encoding="utf-8", errors="replace")
        if code == expected:
            return printed
        reason = find_reason(printed + errors.read_text(encoding="utf-8", errors="replace"))
        if code is None:
            raise SelftestError(f"`dstrain {words[0]}` did not end within {TIMEOUT_SECONDS / 60:g} minutes: {reason}")
        raise SelftestError(f"`dstrain {words[0]}` ended with exit code {code} instead of {expected}: {reason}")


def count_train_steps(run_dir: Path) -> int:
    """Return how many rows of training a run has written."""
    file = run_dir / "metrics.jsonl"
    if not file.exists():
        return 0
    return file.read_text(encoding="utf-8").count('"split": "train"')


def check_preset(preset: str, commands: Commands, reference_problem: str) -> Iterator[CheckResult]:
    """Yield a preset's result of every check; after a failed check the others are skipped."""
    failed = ""
    for name in CHECKS:
        if failed:
            yield CheckResult(preset=preset, check=name, state="skipped", detail=f"{failed} failed")
            continue
        start = time.monotonic()
        try:
            detail = run_check(name, preset, commands, reference_problem)
        except SelftestError as error:
            failed, fix = name, FIXES[name].replace("PRESET", preset)
            seconds = time.monotonic() - start
            yield CheckResult(preset=preset, check=name, state="failed", detail=str(error), fix=fix, seconds=seconds)
        else:
            seconds = time.monotonic() - start
            yield CheckResult(preset=preset, check=name, state="ok", detail=detail, seconds=seconds)


def run_check(name: str, preset: str, commands: Commands, reference_problem: str) -> str:
    """Run one check; return the difference that it measured, or ''. Raises SelftestError."""
    run_dir, export_dir = commands.run_dir(preset, "stopped"), commands.run_dir(preset, "export")
    match name:
        case "train":
            commands.train(preset, "stopped", stop=True)
        case "resume":
            commands.train(preset, "stopped", resume=True)
        case "losses":
            if reference_problem:
                raise SelftestError(reference_problem)
            reference = read_rows(commands.run_dir(REFERENCE, "unbroken") / "metrics.jsonl")
            difference, problem = compare_losses(read_rows(run_dir / "metrics.jsonl"), reference)
            if problem:
                raise SelftestError(problem)
            return f"{difference:.1e}"
        case "export":
            commands.start(["export", str(run_dir), "--step", "last", "--to", str(export_dir)])
        case "evaluate":
            return check_evaluation(commands, run_dir, export_dir)
    return ""


def check_evaluation(commands: Commands, run_dir: Path, export_dir: Path) -> str:
    """Evaluate the export: its loss must be the one that the run measured last."""
    words = ["evaluate", str(export_dir), "--data", str(commands.folder / "eval.jsonl"), "--json"]
    loss = parse_json(commands.start(words, commands.second))["loss"]
    measured = [row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if row["split"] == "eval"][-1]
    difference = abs(loss - measured) / abs(measured)
    if difference > TOLERANCE:
        raise SelftestError(
            f"the export's loss is {loss:.8g}, but the run measured {measured:.8g} with the same weights"
        )
    return f"{difference:.1e}"


TIMEOUT_SECONDS = 300.0
"""Longest time of a command; a rank that hangs is found earlier, by `timeout_minutes`."""
POLL_SECONDS = 0.02
KILL_GRACE_SECONDS = 10.0
LOGS_KEPT = "the logs of the processes are kept in"
"""Part of a line about a folder that is removed with the selftest's."""


def find_reason(log: str) -> str:
    """Return the line of a command's output that says why it failed: the last error of dstrain, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and LOGS_KEPT not in line]
    errors = [line for line in lines if line.startswith(("dstrain: ", "error: "))]
    return next(iter([*errors[-1:], *lines[-1:]]), "it printed nothing")


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    output: int,
    errors: int,
    signal_when: Callable[[], bool] | None = None,
) -> int | None:
    """Run a command to its end; return its exit code, None if it took too long.

    `signal_when`: once it is true, the child gets a SIGTERM, as from a scheduler. A signal that ends this process ends
    the child first: SIGTERM and SIGHUP raise KeyboardInterrupt inside. An ignored signal stays ignored, for nohup.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    child = None
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        tied = {**env, PARENT_ENV: str(os.getpid())}
        child = subprocess.Popen(
            command, env=tied, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
        )
        while child.poll() is None and time.monotonic() < deadline:
            if signal_when is not None and signal_when():
                child.terminate()
                signal_when = None
            time.sleep(POLL_SECONDS)
        return child.poll()
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
    rows = [("preset", CHECKS), *((preset, [cells[preset, column] for column in CHECKS]) for preset in presets)]
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
