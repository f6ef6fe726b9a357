"""Environment of the ranks on other hosts, and that nobody else can read it."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.hosts.lab import Lab
from tests.hosts.running import START_SECONDS, Run, start

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

SET = {
    "HF_TOKEN": "hf 'secret' $HOME %h",
    "WANDB_API_KEY": "w-secret",
    "NCCL_DEBUG": "WARN",
    "MINE": '{"k": "o-secret"}',
}


def test_the_environment_reaches_every_rank_and_no_command_line(lab: Lab, tmp_path: Path) -> None:
    run = Run(tmp_path / "job", launch={"env": ["MINE", "PLAIN=a b"]})
    (run.folder / ".deepspeed_env").write_text("# ours\n\nFROM_FILE=1\n")
    job = start(lab, run, env=SET)
    run.wait_for_step(job, 2)
    for host in lab.numbers:
        for process in lab.processes(host):
            assert "secret" not in process.command, process.command
    for rank in (0, 1):
        host, pid = run.rank(rank)
        outside = next(process.outside for process in lab.processes(host) if process.inside == pid)
        lines = Path(f"/proc/{outside}/environ").read_text().split("\0")
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        wanted = SET | {"PLAIN": "a b", "FROM_FILE": "1"}
        assert {name: found.get(name) for name in wanted} == wanted
    job.signal(signal.SIGTERM)
    assert job.wait(START_SECONDS) == 75
    for path in run.run_dir.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes(), path


def test_an_evaluation_on_two_hosts_prints_the_answer_alone(lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    command = [sys.executable, "-m", "dstrain", "evaluate", str(unbroken.run_dir), "--json"]
    command += ["--data", str(next(unbroken.folder.glob("*eval*.jsonl")))]
    command += ["--task", str(Path(__file__).with_name("slowly.py"))]  # a run folder's word for code is not enough
    answers = []
    for more in ([], ["--hostfile", str(lab.hostfile())]):
        line = f"{shlex.join([*command, *more])} 2> {tmp_path / 'errors'}"
        code, said = lab.run(1, ["sh", "-c", line], timeout=START_SECONDS, env={"TMPDIR": str(tmp_path)}, cwd=tmp_path)
        assert code == 0, (tmp_path / "errors").read_text()
        answers.append({name: value for name, value in json.loads(said).items() if "per_second" not in name})
    notes = [answer.pop("notes") for answer in answers]  # a list, which approx does not compare
    assert notes[0] == notes[1]
    assert answers[0] == pytest.approx(answers[1])
    assert lab.left(within=2.0) == []
