"""docs/tasks/own.md teaches a task of one's own: its commands run as they are written, in their order."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dstrain.tasks import find_task
from tests.vocabulary import read_events, read_jsonl, write_jsonl
from tests.workers import ROOT

SECTION = (ROOT / "docs/tasks/own.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"```bash\n(.*?)```", SECTION, flags=re.S)
    for line in block.splitlines()
    if line.startswith("dstrain ")
]
TASK = "docs/examples/tiny_task.py"
WORDS = [("well done", 1), ("thank you", 1), ("go away", 0), ("you fool", 0)]


def start(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dstrain", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(folder: Path, words: list[str]) -> str:
    process = start(folder, words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"{' '.join(words)}\n{output[-3000:]}"
    return output


def interrupt(folder: Path, words: list[str], run_dir: Path) -> None:
    """Run a command and stop it by Ctrl-C once it has written a checkpoint.

    Any checkpoint, because the first is pruned after three more, and this process may not run meanwhile.
    """
    process = start(folder, words)
    deadline = time.monotonic() + 200
    while not any(run_dir.glob("checkpoints/step-????????")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 75, output[-3000:]


def loss_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["split"] == "train"]


def test_the_page_trains_continues_evaluates_and_exports() -> None:
    assert [words[0] for words in COMMANDS] == ["train", "train", "evaluate", "export", "evaluate"]
    first, second = (" ".join(words) for words in COMMANDS[:2])
    assert "--ds-config zero3 --num-gpus 2" in first
    assert second == first.replace("zero3", "zero1").replace("--num-gpus 2", "--num-gpus 1"), "the same command"


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / TASK).parent.mkdir(parents=True)
    shutil.copy(ROOT / TASK, tmp_path / TASK)
    write_jsonl(tmp_path / "lines.jsonl", [{"text": text, "label": label} for text, label in WORDS * 16])
    train, go_on, *others = COMMANDS
    run = tmp_path / "runs/tiny_task"
    interrupt(tmp_path, train, run)
    stopped_at = max(row["step"] for row in loss_rows(run))
    assert "continuing from step" in finish(tmp_path, go_on)
    rows = loss_rows(run)
    steps = [row["step"] for row in rows]  # with a row of the step at which the first command was stopped
    (last,) = [int(word.removeprefix("steps=")) for word in train if word.startswith("steps=")]
    assert steps == sorted({*range(10, last + 1, 10), stopped_at})
    assert stopped_at < last, "the second command had steps left"
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    (told,) = read_events(run, "resharded")
    assert told["step"] >= 20
    for words in others:
        output = finish(tmp_path, words)
        if words[0] == "evaluate":
            assert re.search(r"accuracy +1\b", output), output
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", SECTION, flags=re.S) if "load_file" in block]
    names: dict[str, Any] = {}
    exec(code.replace("friendly/", f"{tmp_path}/friendly/"), names)
    assert names["state"].keys() == load_file(tmp_path / "friendly/model.safetensors").keys()
    assert find_task(str(tmp_path / "friendly/task.py")).learning_rate == 1e-2
