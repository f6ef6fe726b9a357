"""Closed standard streams: daemontools, cron and some CI wrappers start programs so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cells import mark_slow
from tests.workers import ROOT

CLOSED = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-", "all": "<&- >&- 2>&-"}


def run(words: str, closed: str) -> subprocess.CompletedProcess[bytes]:
    command = f"exec {sys.executable} -m dstrain.cli {words} {CLOSED[closed]}"
    return subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=60, check=False)


COMMANDS = [("--help", 0), ("tasks rm", 0), ("train nowhere.yaml", 2), ("nothing", 2)]
LONG = [(words, code, closed) for words, code in COMMANDS[1:3] for closed in CLOSED if closed != "all"]
"""Commands that import more, with streams that another cell closes too."""


@pytest.mark.parametrize(
    ("words", "code", "closed"), mark_slow([(*command, closed) for command in COMMANDS for closed in CLOSED], LONG)
)
def test_a_command_with_closed_streams_ends_with_its_code(words: str, code: int, closed: str) -> None:
    told = run(words, closed)
    assert told.returncode == code
    assert b"Traceback" not in told.stdout + told.stderr


@pytest.mark.parametrize(
    ("words", "code"), [("data check FILE --task rm", 141), ("tasks rm", 141), ("data check nowhere --task rm", 2)]
)
def test_a_command_whose_reader_has_gone_ends_quietly_and_not_as_a_failed_run(
    words: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"chosen": 1}\n' * 100)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dstrain.cli", *words.replace("FILE", str(tmp_path / "bad.jsonl")).split()]
    told = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=writing, timeout=60, check=False)
    assert told.returncode == code
    told = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert told.returncode == code
    assert b"Traceback" not in told.stderr
    assert b"Exception ignored" not in told.stderr


@pytest.mark.parametrize("words", ["tasks rm", "--help", "train --help"])
def test_an_output_on_a_full_disk_is_said_without_a_traceback(words: str) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "dstrain.cli", *words.split()]
        told = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert told.returncode == 1
    assert b"No space left on device; free some space" in told.stderr
    assert told.stderr.count(b"\n") == 1, told.stderr


def test_what_is_opened_later_is_no_stream(tmp_path: Path) -> None:
    script = "from dstrain.process_setup import open_closed_streams as o; import os, sys; o(); f = os.open(sys.argv[1], 65); os.write(f, b'x'); print('stray')"
    file = tmp_path / "file"
    subprocess.run(
        ["sh", "-c", f'exec {sys.executable} -c "{script}" {file} <&- >&- 2>&-'],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert file.read_bytes() == b"x"
