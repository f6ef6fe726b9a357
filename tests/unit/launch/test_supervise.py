"""Supervision, tested with workers of a few lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import Recipe
from dstrain.launch import spawn, supervise
from dstrain.launch.plan import Launch
from dstrain.launch.spawn import LocalWorkerGroup, RankEnd
from dstrain.launch.supervise import LaunchOutcome, compute_outcome
from dstrain.launch.worker import RankRecord
from tests.vocabulary import wait_until

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and process trees are Linux's here")

WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dstrain.launch.worker import exit_with_parent, record_end, record_start, redirect_output
rank, run = int(os.environ["RANK"]), Path("run")
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda n, f: asked.append(n))
exit_with_parent()
record_start(run, rank)
def end(code, error=None):
    record_end(run, rank, code, error)
    os._exit(code)
def tell(what):
    # The file appears with its whole content.
    Path(f"{what}-{rank}.partial").write_text(str(os.getpid()))
    os.rename(f"{what}-{rank}.partial", f"{what}-{rank}")
def work(seconds=60):
    tell("ready")
    until = time.monotonic() + seconds
    while not asked and time.monotonic() < until:
        time.sleep(0.01)
"""


class Run:
    """A supervised launch in a process of its own."""

    def __init__(
        self, folder: Path, worker: str, duplicate_seconds: float = 0.5,
        grace_seconds: float = supervise.FAILURE_GRACE_SECONDS,
    ) -> None:  # fmt: skip
        self.folder = folder
        (folder / "worker.py").write_text(WORKER + textwrap.dedent(worker))
        (folder / "main.py").write_text(
            "import os, sys\nfrom pathlib import Path\n"
            "from dstrain.launch.plan import Launch\nfrom dstrain.launch.spawn import LocalWorkerGroup\n"
            "from dstrain.launch.supervise import supervise\n"
            "from dstrain.launch import supervise as module\n"
            f"module.DUPLICATE_SIGNAL_SECONDS = {duplicate_seconds}\n"
            f"module.FAILURE_GRACE_SECONDS = {grace_seconds}\n"
            "launch = Launch(argv=[sys.executable, 'worker.py'], environment=os.environ, ranks=range(2), world_size=2)\n"
            "sys.exit(supervise(LocalWorkerGroup(launch, Path('run'))))\n"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MARK": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "main.py"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pids(self, count: int = 2) -> list[int]:
        """The workers' pids, once all are at work."""
        return self.wait_for_workers("ready", count)

    def wait_for_workers(self, what: str, count: int = 2) -> list[int]:
        """Wait until so many workers told this; return their pids."""
        files = [self.folder / f"{what}-{rank}" for rank in range(count)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def left(self) -> list[int]:
        """Processes of this launch that still live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("MARK") == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(worker: str, **options: float) -> Run:
        runs.append(Run(tmp_path, worker, **options))
        return runs[-1]

    yield start
    for one in runs:
        one.process.kill()
        wait_until(lambda one=one: not one.left())


def test_a_crash_after_every_rank_has_ended_exits_0(run):
    started = run("record_end(run, rank, 0); time.sleep(rank); os._exit(250 if rank == 1 else 0)")
    assert started.end() == (0, "")


def test_one_rank_with_a_usage_error_exits_2(run):
    code, said = run("""
        if rank == 1:
            end(2, "data.train: no such file")
        work()
        sys.exit(0)
    """).end()
    assert code == 2
    assert "rank 1 failed with code 2: data.train: no such file" in said


@pytest.mark.slow
@pytest.mark.parametrize("has_error", [False, True])
def test_a_failed_rank_is_1_and_named_with_its_error_or_after_the_end_of_its_log(has_error, run):
    ending = 'end(1, "the loss is nan at step 7")' if has_error else "os._exit(1)"
    code, said = run(f"""
        if rank == 1:
            redirect_output(run / "logs" / "rank-00001.log", copy_to_terminal=False)
            for line in range(30):
                print("line", line)
            {ending}
        work()
        time.sleep(1)  # the one to blame ends well before
        os._exit(1)
    """).end()
    assert code == 1
    if has_error:
        assert "rank 1 failed with code 1: the loss is nan at step 7" in said
        assert "| line" not in said
    else:
        assert "line 9\n" not in said
        assert said.index("| line 10\n") < said.index("| line 29\n") < said.index("rank 1 ended with code 1")


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("debug", ["0", "1"])
def test_an_unexpected_error_is_one_line_and_its_traceback_in_the_log(
    bad: int, debug: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_DEBUG", debug)
    code, said = run(f"""
        from dstrain.launch.worker import run_worker
        def train():
            print("before")
            if rank != {bad}:
                work(1)
                return 0
            raise ZeroDivisionError("of a library\\nwith lines")
        os._exit(run_worker(run, rank, train))
    """).end()
    log = tmp_path / f"run/logs/rank-{bad:05d}.log"
    assert code == 1
    where = "(in train, worker.py:30)"  # the program above, as the code of a task would be
    line = f"rank {bad} failed with code 1: ZeroDivisionError: of a library {where}; the full traceback is in run/logs/rank-{bad:05d}.log"
    assert said.count(line) == 1
    assert ("Traceback" in said) == (debug == "1")
    assert f"rank {bad} failed:\nTraceback" in log.read_text()
    assert "with lines" in log.read_text()


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_a_rank_is_printed_once(bad: int, run, tmp_path: Path) -> None:
    code, said = run(f"""
        from dstrain.errors import PeerFailureError, RunError
        from dstrain.launch.worker import run_worker
        def train():
            print("before")
            if rank == {bad}:
                raise RunError("the loss is nan; lower optim.lr")
            time.sleep(0.5 * rank)
            raise PeerFailureError("step 3", "rank {bad} failed: the loss is nan", "start again")
        os._exit(run_worker(run, rank, train))
    """).end()
    assert code == 1
    assert said == f"before\ndstrain: rank {bad} failed with code 1: the loss is nan; lower optim.lr\n"
    log = (tmp_path / "run/logs/rank-00000.log").read_text()
    assert "error: the loss is nan; lower optim.lr" in log or "error: step 3: rank 1 failed" in log


def test_a_rank_that_was_stopped_is_named_beside_the_rank_that_lost_it_and_has_no_grace_period(run) -> None:
    started = run(
        """
        from dstrain.errors import PeerFailureError
        from dstrain.launch.worker import run_worker
        if rank == 1:
            tell("ready")
            os.kill(os.getpid(), signal.SIGSTOP)
        def train():
            tell("ready")
            while "State:\tT" not in Path(f"/proc/{Path('ready-1').read_text()}/status").read_text():
                time.sleep(0.01)
            raise PeerFailureError("step 3", "rank 1 went silent", "start again")
        while not Path("ready-1").exists():
            time.sleep(0.01)
        os._exit(run_worker(run, rank, train))
        """,
        grace_seconds=600.0,
    )
    code, said = started.end()
    assert code == 1
    assert (
        "dstrain: rank 0 failed with code 1: step 3: rank 1 went silent; start again; stopped by SIGSTOP or a debugger: rank 1\n"
        in said
    )
    assert started.left() == []


def test_a_killed_rank_is_1_and_named_with_its_signal(run):
    started = run("work(); os._exit(1)")
    os.kill(started.pids()[1], signal.SIGKILL)
    code, said = started.end()
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in said


def test_ranks_that_report_nothing_exit_1_with_their_exit_code(run):
    code, said = run("os._exit(3)").end()
    assert (code, "ended with code 3" in said) == (1, True)


def test_usr1_asks_for_a_checkpoint_and_the_ranks_go_on(run):
    started = run("work(); tell('asked'); time.sleep(0.3); end(0)")
    started.pids()
    started.process.send_signal(signal.SIGUSR1)
    code, said = started.end()
    assert code == 0
    assert "SIGUSR1: asked 2 worker(s) to write a checkpoint; the run goes on" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_workers_and_a_checkpoint_makes_75(run, number):
    started = run("""
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # a data worker: not to be signalled
        work()
        time.sleep(0.3)  # the checkpoint
        Path(f"saved-{rank}").write_text(str(asked))
        end(75)
    """)
    started.pids()
    started.process.send_signal(number)
    code, said = started.end()
    assert code == 75
    assert "asked 2 worker(s)" in said
    for rank in range(2):
        assert json.loads((started.folder / f"saved-{rank}").read_text())[0] == number


def test_the_same_signal_twice_in_a_moment_is_one(run):
    started = run("work(); tell('asked'); time.sleep(0.3); end(75)", duplicate_seconds=60.0)
    started.pids()
    started.process.terminate()
    started.wait_for_workers("asked")
    started.process.terminate()
    assert started.end()[0] == 75


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(run):
    started = run("work(); tell('asked'); time.sleep(60)")
    started.pids()
    started.process.terminate()
    started.wait_for_workers("asked")
    time.sleep(0.8)  # more than DUPLICATE_SIGNAL_SECONDS after the supervisor took the first one
    began = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    code, said = started.end()
    assert (code, "what was not in a checkpoint is lost" in said) == (1, True)
    assert time.monotonic() - began < supervise.FAILURE_GRACE_SECONDS
    assert started.left() == []


@pytest.mark.slow
def test_a_reader_that_stands_still_does_not_hold_up_the_watch(run):
    """`dstrain train ... 2>&1 | less`, or Ctrl-S: the pipe is full when the first signal is answered, and a second one comes."""
    started = run("work(); tell('asked'); time.sleep(60)")
    started.pids()
    pipe = os.open(f"/proc/{started.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")
    os.close(pipe)
    started.process.terminate()
    started.wait_for_workers("asked")
    time.sleep(0.8)
    started.process.send_signal(signal.SIGINT)
    wait_until(lambda: started.left() in ([], [started.process.pid]), 8)
    code, said = started.end()
    assert (code, "what was not in a checkpoint is lost" in said) == (1, True)


def test_a_signal_before_any_worker_has_begun_is_explained(tmp_path, run):
    """A worker imports for seconds; until then the signal has its usual meaning."""
    (tmp_path / "sitecustomize.py").write_text("")
    started = run("")
    (tmp_path / "worker.py").write_text("import time; time.sleep(60)")
    started.process.kill()
    started.process.communicate()
    started.process = subprocess.Popen(
        [sys.executable, "main.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "MARK": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: len(started.left()) == 3)
    started.process.terminate()
    code, said = started.end()
    assert (code, "before a worker had begun, so there was nothing to save" in said) == (1, True), said


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGHUP, 1), (signal.SIGUSR1, 0)],
)
def test_a_signal_while_the_input_is_checked_ends_with_1_and_usr1_ends_nothing(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve_with_signal(request: TrainRequest) -> Recipe:
        os.kill(os.getpid(), number)
        return resolve_recipe(request)

    monkeypatch.setattr("dstrain.commands.train.resolve_recipe", resolve_with_signal)
    done = CliRunner().invoke(main, ["train", "demo-rm", "--dry-run"])
    assert (done.exit_code, "no worker runs, so there is nothing to save" in done.output) == (code, code == 1), (
        done.output
    )


def test_usr1_does_not_end_a_command_that_writes_no_checkpoint(tmp_path: Path) -> None:
    state = supervise.StopState(saves_checkpoint=False)
    for number, killed in ((signal.SIGUSR1, False), (signal.SIGTERM, True), (signal.SIGUSR1, True)):
        supervise._forward_signal(number, state, Gone(tmp_path))
        assert state.killed == killed


@pytest.mark.slow
def test_the_others_do_not_outlive_a_killed_rank_for_long(run):
    """Where a launcher waits for all of them, and they for a rank that will not come."""
    started = run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); work(); time.sleep(60)",
    )
    os.kill(started.pids()[1], signal.SIGKILL)
    began = time.monotonic()
    code, said = started.end()
    assert (code, "rank 1 was killed by SIGKILL (is the host's memory full?" in said) == (1, True), said
    assert time.monotonic() - began < 20  # DeepSpeed gives them 30
    assert started.left() == []


class Gone:
    """A launch on two hosts: rank 0 ended and was reaped before its agent could ask how, rank 1 still waits for it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.abort_reason = run_dir, ""
        self.launch = Launch(argv=[], environment={}, world_size=2, ranks=range(2))
        self.alive_ranks, self.ends = {1}, {0: RankEnd(None, RankRecord(0, 1, None, None, "host1"))}

    def kill(self) -> list[str]:
        self.alive_ranks = set()
        self.ends[1] = RankEnd(-signal.SIGKILL, RankRecord(1, 1, None, None, "host2"))
        return []

    def find_stopped_ranks(self) -> set[int]:
        return set()

    def start(self) -> None: ...
    def poll(self) -> None: ...
    def is_alive(self) -> bool:
        return bool(self.alive_ranks)

    def send_signal(self, signum: int) -> int:
        return 0

    def wait_for_event(self, timeout: float) -> None:
        time.sleep(timeout)

    def find_output(self, rank: int | None) -> Path:
        return self.run_dir / "launcher.log"


def test_who_was_ended_by_us_is_not_to_blame(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "KILLED_GRACE_SECONDS", 0.1)
    (tmp_path / "launcher.log").write_text("no module named dstrain\n")
    assert supervise.supervise(Gone(tmp_path)) == 1
    said = capfd.readouterr().err
    assert "rank 0 on host1 ended without a report" in said
    assert "| no module named dstrain" in said, "the launcher's words where the rank has none"


def test_an_orphan_is_ended_with_the_launch(run):
    started = run(
        """
        if rank == 0:  # a grandchild that left its session
            sleep = "import time; time.sleep(60)"
            subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True, stdout=subprocess.DEVNULL)
        end(0)
        """
    )
    assert started.end()[0] == 0
    assert started.left() == []


def test_workers_end_with_a_killed_supervisor(run):
    started = run("work(); os._exit(0)")
    assert len(started.pids()) == 2
    started.process.kill()
    wait_until(lambda: not started.left(), seconds=5)
    started.process.communicate()
    assert started.process.returncode == -signal.SIGKILL


def test_word_of_an_earlier_launch_does_not_count(run, tmp_path):
    (tmp_path / "run" / ".workers").mkdir(parents=True)
    for rank in range(2):
        record = {"rank": rank, "pid": 1, "exit": 0, "error": None}
        (tmp_path / "run" / ".workers" / f"rank-0000{rank}.json").write_text(json.dumps(record))
    assert run("os._exit(3)").end()[0] == 1


def test_the_record_of_a_rank_that_cannot_be_ended_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the kernel, on a disk that does not answer, after its work was done."""
    work = "import sys, time; from pathlib import Path; from dstrain.launch.worker import record_end; "
    work += "record_end(Path(sys.argv[1]), 0, 0); time.sleep(60)"
    argv = [sys.executable, "-c", work, str(tmp_path)]
    group = LocalWorkerGroup(
        Launch(argv=argv, environment={**os.environ, "PYTHONPATH": str(ROOT)}, world_size=1, ranks=range(1)), tmp_path
    )
    monkeypatch.setattr(spawn, "kill_descendants", lambda excluded_pids, kept_pids: list(kept_pids))
    group.start()
    try:
        wait_until(lambda: (tmp_path / ".workers/rank-00000.json").exists())
        assert len(group.kill()) == 1
        assert compute_outcome(group.ends, range(1)) == LaunchOutcome(0)
    finally:
        monkeypatch.undo()
        group.kill()


def records(*codes: int | None) -> dict[int, RankRecord]:
    return {rank: RankRecord(rank, 1, code, None) for rank, code in enumerate(codes)}


def with_records(codes: dict[int, int], records: dict[int, RankRecord]) -> dict[int, RankEnd]:
    return {rank: RankEnd(code, records.get(rank)) for rank, code in codes.items()}


@pytest.mark.parametrize(
    ("given", "ends", "result"),
    [
        (records(0, 0), {0: 0, 1: -11}, LaunchOutcome(0)),
        (records(75, 75), {0: 75, 1: -15}, LaunchOutcome(75)),
        (records(0), {0: 0, 1: 0}, LaunchOutcome(1, "rank 1 reported no result; it ended with code 0", 1)),
        (
            records(0, 75),
            {0: 0, 1: 75},
            LaunchOutcome(1, "the ranks ended differently: rank 0 with 0, rank 1 with 75"),
        ),
        (records(1, None), {1: -11, 0: 1}, LaunchOutcome(1, "rank 1 was killed by SIGSEGV", 1)),
        (records(None, 1), {0: -15, 1: 1}, LaunchOutcome(1, "rank 1 failed with code 1", 1)),
        (records(75, None), {0: 75, 1: 3}, LaunchOutcome(1, "rank 1 ended with code 3", 1)),
        (records(None, 2), {0: -15, 1: 2}, LaunchOutcome(2, "rank 1 failed with code 2", 1)),
        (
            {},
            {0: -9, 1: -15},
            LaunchOutcome(1, "rank 0 was killed by SIGKILL (is the host's memory full? see dmesg)", 0),
        ),
        ({}, {0: 1, 1: 1}, LaunchOutcome(1, "rank 0 ended with code 1", 0)),
        (
            {0: RankRecord(0, 1, 1, "lost rank 1", error_kind="peer"), 1: RankRecord(1, 1, 1, "no disk")},
            {0: 1, 1: 1},
            LaunchOutcome(1, "rank 1 failed with code 1: no disk", 1),
        ),
    ],
)
def test_the_exit_code_follows_records_before_processes(given, ends, result):
    assert compute_outcome(with_records(ends, given), range(2)) == result


def failed(rank: int, error: str) -> RankRecord:
    return RankRecord(rank, 1, 1, error, "host", "memory")


def test_ranks_that_ran_out_of_memory_make_one_message() -> None:
    lost = RankRecord(0, 1, 1, "step 3: rank 2 failed", "host")
    records = {0: lost, 1: failed(1, "out of memory: rank 1\n  1. batch.micro"), 2: failed(2, "out of memory: rank 2")}
    outcome = compute_outcome(with_records({0: 1, 2: 1, 1: 1}, records), range(3))
    assert (outcome.code, outcome.rank) == (1, 1)
    assert outcome.message == "rank 1 ran out of memory, and so did rank 2\nout of memory: rank 1\n  1. batch.micro"


def test_ranks_that_failed_alike_make_one_message_of_the_first() -> None:
    records = {
        rank: RankRecord(rank, 1, 1, "the loss is nan; lower it" if rank else "other", "host") for rank in range(3)
    }
    outcome = compute_outcome(with_records({2: 1, 1: 1, 0: 1}, records), range(3))
    assert outcome == LaunchOutcome(1, "rank 1 failed with code 1, and so did rank 2: the loss is nan; lower it", 1)


def test_a_rank_that_the_kernel_killed_for_memory_is_said_to_be() -> None:
    ends = with_records({1: -9, 0: -15}, records(None, None))
    reason = "the kernel killed it because memory was full (kernel log: 3.0 GiB resident)"
    outcome = compute_outcome({**ends, 1: replace(ends[1], kill_reason=reason)}, range(2))
    assert outcome.message.startswith(f"rank 1 was killed by SIGKILL: {reason}; lower data.workers and data.prefetch")
    without = compute_outcome(ends, range(2))
    assert without.message == "rank 1 was killed by SIGKILL (is the host's memory full? see dmesg)"
