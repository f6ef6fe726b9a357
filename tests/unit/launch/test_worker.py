"""Output of a rank, and its exit record."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dstrain.launch.worker import (
    RankRecord,
    end_elastic_agent,
    get_workers_dir,
    log_path,
    read_rank_records,
    record_end,
    record_start,
)
from tests.vocabulary import wait_until

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="file descriptors are Linux's here")


def start(script: str, folder: Path, **streams) -> subprocess.Popen:
    begin = "import os, sys, time\nfrom pathlib import Path\nfrom dstrain.launch.worker import redirect_output\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", begin + script], cwd=folder, env=env, **streams)


@pytest.mark.parametrize(
    ("env", "sent"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "x", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
    ],
)
def test_an_elastic_agent_that_would_try_again_is_ended(env, sent, monkeypatch):
    signals = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    end_elastic_agent(env)
    assert signals == ([(os.getppid(), signal.SIGTERM)] if sent else [])


def test_a_record_says_how_a_rank_ended(tmp_path):
    record_start(tmp_path, 3)
    assert read_rank_records(tmp_path) == {3: RankRecord(3, os.getpid(), None, None, socket.gethostname())}
    record_end(tmp_path, 3, 1, "no memory")
    assert read_rank_records(tmp_path) == {3: RankRecord(3, os.getpid(), 1, "no memory", socket.gethostname())}
    assert [path.name for path in get_workers_dir(tmp_path).iterdir()] == ["rank-00003.json"]


def test_a_torn_record_is_no_record(tmp_path):
    get_workers_dir(tmp_path).mkdir()
    (get_workers_dir(tmp_path) / "rank-00000.json").write_text('{"rank": 0')
    assert read_rank_records(tmp_path) == {}


def test_a_record_that_is_nested_deeply_is_no_record(tmp_path):
    get_workers_dir(tmp_path).mkdir()
    (get_workers_dir(tmp_path) / "rank-00000.json").write_text("[" * 60_000)
    assert read_rank_records(tmp_path) == {}


def test_a_record_that_is_not_a_small_file_is_no_record(tmp_path):
    get_workers_dir(tmp_path).mkdir()
    os.mkfifo(get_workers_dir(tmp_path) / "rank-00000.json")
    assert read_rank_records(tmp_path) == {}
    record_start(tmp_path, 1)
    os.truncate(get_workers_dir(tmp_path) / "rank-00001.json", 1 << 33)
    assert read_rank_records(tmp_path) == {}


def test_a_long_error_is_recorded_in_part(tmp_path):
    record_end(tmp_path, 0, 1, "\U0001f600" * 10**6)
    assert set(read_rank_records(tmp_path)[0].error) == {"\U0001f600"}


def test_rank_0_writes_to_its_log_and_to_the_terminal(tmp_path):
    script = (
        "redirect_output(Path('logs/a.log'), copy_to_terminal=True)\n"
        "print('python'); os.system('echo a child'); os.write(2, b'a library\\n'); sys.exit(3)"
    )
    process = start(script, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, _ = process.communicate(timeout=60)
    assert said == "python\na child\na library\n" == (tmp_path / "logs/a.log").read_text()
    assert process.returncode == 3


def test_the_terminal_gets_nothing_after_the_end_of_its_part(tmp_path):
    script = (
        "from dstrain.launch.worker import end_terminal_output\n"
        "redirect_output(Path('a.log'), True)\nprint('one')\nend_terminal_output(0)\nprint('two')"
    )
    process = start(script, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.communicate(timeout=60)[0] == "one\n"
    assert (tmp_path / "a.log").read_text() == "one\n--- the rest is in this log only ---\ntwo\n"


def test_other_ranks_write_to_their_log_only(tmp_path):
    log = log_path(tmp_path, 1)
    script = f"print('before'); redirect_output(Path('{log}'), copy_to_terminal=False); print('after')"
    process = start(script, tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=60)[0] == "before\n"
    assert log.read_text() == "after\n"


def test_a_log_goes_on_where_the_launch_before_stopped(tmp_path):
    (tmp_path / "a.log").write_text("first launch\n")
    process = start(
        "redirect_output(Path('a.log'), True); print('second')", tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.communicate(timeout=60)[0] == "second\n"
    assert (tmp_path / "a.log").read_text() == "first launch\nsecond\n"


def test_a_dead_terminal_never_reaches_the_rank(tmp_path):
    script = (
        "redirect_output(Path('a.log'), True)\nprint('one')\ntime.sleep(0.5)\n"
        "for line in range(20000): print('more', line)\ntime.sleep(0.3); print('last')"
    )
    process = start(script, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout.readline() == b"one\n"
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "a.log").read_text().endswith("more 19999\nlast\n")


def test_the_death_of_the_copying_child_never_reaches_the_rank(tmp_path):
    script = "redirect_output(Path('a.log'), True); print('one'); time.sleep(1); print('last')"
    process = start(script, tmp_path, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"one\n"
    for child in psutil.Process(process.pid).children():
        child.kill()
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "a.log").read_text() == "one\nlast\n"
    process.stdout.close()


def test_the_last_words_of_a_killed_rank_reach_log_and_terminal(tmp_path):
    script = "redirect_output(Path('a.log'), True); print('last words'); os.kill(os.getpid(), 9)"
    process = start(script, tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=60)[0] == "last words\n" == (tmp_path / "a.log").read_text()
    assert process.returncode == -signal.SIGKILL


def test_nothing_is_left_of_a_rank_that_ended(tmp_path):
    process = start("redirect_output(Path('a.log'), True); os._exit(0)", tmp_path, stdout=subprocess.DEVNULL)
    process.wait(timeout=60)

    def find_copies() -> list[psutil.Process]:
        return [other for other in psutil.process_iter() if copies_into(tmp_path, other)]

    wait_until(lambda: not find_copies())
    assert not find_copies()


def copies_into(folder: Path, process: psutil.Process) -> bool:
    """Return True if the process copies a log from this working folder; those of other tests come and go."""
    try:
        return "tee_log.py" in " ".join(process.cmdline()) and Path(process.cwd()) == folder
    except psutil.Error:
        return False


@pytest.mark.parametrize("kind", ["DstrainError", "ValueError"])
def test_a_url_with_a_password_reaches_neither_log_nor_record(kind: str, tmp_path: Path) -> None:
    """HF_ENDPOINT, a proxy or a mirror may have one, and libraries put the whole address into their errors."""
    script = f"""
import sys
from pathlib import Path
from dstrain.errors import DstrainError
from dstrain.launch.worker import run_worker
def work():
    raise {kind}("the hub https://me:pass-w%40rd@host:1/a and s3://:pass-w%40rd@b cannot be reached; http://host:80/a@b, me@host")
sys.exit(run_worker(Path(sys.argv[1]), 0, work))
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    kept = [log_path(tmp_path, 0).read_text(), read_rank_records(tmp_path)[0].error or ""]
    assert told.returncode == 1
    for text in kept:
        assert "pass-w" not in text
        assert "https://me:...@host:1/a and s3://:...@b cannot be reached; http://host:80/a@b, me@host" in text


@pytest.mark.parametrize("kind", ["DstrainError", "ValueError"])
def test_control_characters_of_an_error_reach_neither_log_nor_terminal(kind: str, tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from dstrain.errors import DstrainError
from dstrain.launch.worker import run_worker
from dstrain.process_setup import log_stdout
def work():
    log_stdout("data: \\x1b]0;x\\x07\\x9b8m.jsonl")
    raise {kind}("a \\x1b]0;x\\x07\\x9b8m of a file")
sys.exit(run_worker(Path(sys.argv[1]), 0, work))
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    for text in (told.stdout + told.stderr, log_path(tmp_path, 0).read_text()):
        assert not {*"\x1b\x07\x9b"} & {*text}, text
        assert "data: \\x1b]0;x\\x07\\x9b8m.jsonl\n" in text
        assert "\\x1b]0;x\\x07\\x9b8m of a file" in text


def test_a_full_disk_ends_a_rank_with_a_fix_and_no_traceback(tmp_path: Path) -> None:
    script = """
import errno, os, sys
from pathlib import Path
from dstrain.launch.worker import run_worker
def work():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "environment.json")
sys.exit(run_worker(Path(sys.argv[1]), 0, work))
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    said = "environment.json: No space left on device; free some space or inodes (`df -h`, `df -i`), or write to another disk"
    assert read_rank_records(tmp_path)[0].error == said
    assert log_path(tmp_path, 0).read_text() == f"error: {said}\n"


def test_the_log_alone_has_the_output_of_a_compiler_that_failed(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from dstrain.launch.worker import run_worker
def work():
    raise RuntimeError("Error building extension 'cpu_adam'\\nx.cpp:3: error: y\\nnote: line 4")
sys.exit(run_worker(Path(sys.argv[1]), 0, work))
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "error: DeepSpeed cannot compile the kernel cpu_adam (x.cpp:3: error: y)" in told.stdout + told.stderr
    assert "note: line 4" not in told.stdout + told.stderr
    assert "note: line 4" in log_path(tmp_path, 0).read_text()


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("broken", ["open_for_writing", "atomic_write"])
def test_a_disk_that_fails_before_the_log_is_open_is_told_once(broken: str, supervised: bool, tmp_path: Path) -> None:
    """The supervisor prints what a rank records; where there is neither record nor supervisor the rank prints it."""
    script = f"""
import errno, os, socket, sys
from pathlib import Path
from dstrain.launch import worker
if {supervised}:
    os.environ[worker.SUPERVISOR_ENV] = f"{{socket.gethostname()}} {{os.getppid()}}"
def fail(path, *args, **kwargs):
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
worker.{broken} = fail
sys.exit(worker.run_worker(Path(sys.argv[1]), 0, lambda: 0))
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    place = tmp_path / ("logs/rank-00000.log" if broken == "open_for_writing" else ".workers/rank-00000.json")
    said = f"{place}: Input/output error; the disk or network file system failed"
    recorded = [record.error for record in read_rank_records(tmp_path).values()]
    assert recorded == ([said] if broken == "open_for_writing" else [])
    assert told.stdout + told.stderr == ("" if supervised and recorded else f"error: {said}\n")


def test_a_log_folder_that_leads_elsewhere_ends_a_rank_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to("elsewhere")
    script = "import sys\nfrom pathlib import Path\nfrom dstrain.launch.worker import run_worker\nsys.exit(run_worker(Path(sys.argv[1]), 0, lambda: 0))"
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert told.returncode == 2
    assert told.stderr.startswith(f"error: {tmp_path}/logs: is a link to elsewhere, ")
    assert not list((tmp_path / "elsewhere").iterdir())
