"""`dstrain selftest`: starts the launches, in child processes, and collects their results."""

# Both launches are children of this process, so that a rank that crashes or hangs costs the checks of one preset: the
# launch is then repeated with the presets behind it. All that they write lies in one folder: runs, cache, logs.

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dstrain.commands.job.temp_dirs import make_scratch, make_scratch_path
from dstrain.commands.recipe.find_recipe import RECIPES_DIR
from dstrain.commands.selftest.checks import (
    CHECKS,
    CheckResult,
    Phase,
    error_path,
    read_results,
    result_path,
    run_name,
    skip,
)
from dstrain.commands.selftest.environment import EnvironmentLine, collect_lines
from dstrain.commands.selftest.job import RECIPE, suggest_fix
from dstrain.commands.selftest.table import SelftestReport
from dstrain.errors import UsageError
from dstrain.launch.topology import visible_gpus, worker_from_env
from dstrain.preset import preset_names, read_preset

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


def describe_environment(folder: Path) -> list[EnvironmentLine]:
    """Return the lines on this machine, which are printed before the first launch."""
    return collect_lines(folder)


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
