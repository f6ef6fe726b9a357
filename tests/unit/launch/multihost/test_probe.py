"""Checks of hosts before a launch, their errors, and login scripts that print."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest

from dstrain import __version__
from dstrain.launch.multihost import agent_client
from dstrain.launch.multihost.agent_client import AgentClient, iter_host_faults
from dstrain.launch.multihost.hostfile import parse_hostfile
from dstrain.launch.multihost.probe import (
    find_source_diff,
    hash_source_files,
    hash_source_tree,
    iter_version_diffs,
    read_package_versions,
)
from dstrain.launch.multihost.worker_group import open_worker_group
from dstrain.launch.worker import get_workers_dir, remove_worker_files
from tests.unit.launch.multihost.test_worker_group import faults

SCRIPTS = {
    "no line break": "printf hello",
    "a terminal title": r'echo -ne "\033]0;$HOSTNAME\007"',
    "JSON": """echo '{"host_info": {}}'; printf '{"host_info": '""",
    "ten megabytes": "head -c 10000000 /dev/zero | tr '\\0' x",
    "bytes": "head -c 100000 /dev/urandom; head -c 100000 /dev/urandom >&2",
    "slow": "sleep 2",
    "strict": "set -e; set -u; set -o pipefail",
    "aliases": "shopt -s expand_aliases; alias exec='echo no' env='echo no' python='echo no'; exec() { echo no; }",
    "a process that goes on printing": "(while sleep 0.05; do printf noise; done) &",
    "reads": "read -t 1 line",
    "at the end": "trap 'echo bye; echo bye >&2' EXIT",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_login_script_may_print_what_it_likes(script, launch, login_script, tmp_path):
    login_script.write_text(f"{script}\n")
    with open_worker_group(launch("login slots=2\n"), tmp_path) as group:
        assert group.kill() == []
        assert group.abort_reason == ""


@pytest.mark.parametrize("script", ["exit 1", "echo over >&2; exec false", "echo over >&2; kill -9 $$"])
def test_a_login_script_that_ends_the_shell_is_named(script, launch, login_script, tmp_path):
    login_script.write_text(f"{script}\n")
    (said,) = faults(launch("login slots=2\n"), tmp_path)
    code, why = ("-9", "over") if "kill" in script else ("1", "no message" if script == "exit 1" else "over")
    assert said == (
        f"F:1 login: its login shell or its agent ended with code {code} before it answered ({why}); "
        "`ssh login true; echo $?` must print 0: check the login scripts there, such as ~/.bashrc"
    )


def test_a_login_script_that_does_not_end_is_named(launch, login_script, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_client, "REQUEST_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(agent_client, "SECONDS_PER_HOST", 0.5)
    login_script.write_text("while :; do echo y; done\n")
    (said,) = faults(launch("login slots=2\n"), tmp_path)
    assert said.startswith("F:1 login: no answer from its agent in 1.5 s, only other output (of its login shell, or ")
    assert "`ssh login true` must end within that time without a prompt" in said


def test_the_reason_is_what_ssh_said_and_not_the_host(launch, tmp_path):
    said = faults(launch("denied slots=1\nmute slots=1\n"), tmp_path)
    assert "denied: cannot be reached by ssh (me@denied: Permission denied (publickey).)" in said[0]
    assert "the network (also its MTU)" in said[0]
    assert "mute: its agent was ended there (ssh ended with code 255 without a message); see `dmesg` there" in said[1]


def test_an_agent_that_ends_after_its_answer_is_no_fault_of_ssh(launch, tmp_path, monkeypatch):
    def end_agent(_: object, clients: list[agent_client.AgentClient]) -> None:
        agent_client.request(clients, lambda client: {"end": client.nonce}, "never")

    monkeypatch.setattr("dstrain.launch.multihost.agent_client.choose_master", end_agent)
    (said,) = faults(launch("cut slots=1\n"), tmp_path)
    assert said.startswith(
        "F:1 cut: its agent was ended there (Connection to cut closed by remote host.); see `dmesg` there"
    )


def test_agents_wait_while_the_data_are_looked_at(launch, tmp_path):
    """Between the hosts' answers and the start of the ranks lies a check that may take longer than launch.heartbeat_timeout_seconds."""
    with open_worker_group(replace(launch("here slots=2\n"), heartbeat_timeout=1.0), tmp_path) as group:
        time.sleep(2.5)
        group.poll()
        assert group.abort_reason == ""


def peer(name: str, **facts):
    made = AgentClient.__new__(AgentClient)
    made.host = parse_hostfile(f"{name} slots=1\n", "F")[0]
    own = {"versions": read_package_versions(), "digests": hash_source_files()}
    made.host_info = {"machine": name, "sees": True, "has_cwd": True, "gpus": 0, **own, **facts}
    return made


def test_hosts_with_other_software_are_refused_by_name(tmp_path):
    torch = read_package_versions()["torch"]
    other = {"Python": "2.7", "torch": "1.13.1", "peft": ""}
    said = [
        str(fault)
        for _, fault in iter_host_faults([peer("a"), peer("b", versions=read_package_versions() | other)], tmp_path)
    ]
    own = read_package_versions()
    assert said == [
        f"F:1 b: has Python 2.7, a has {own['Python']}; install Python {own['Python']} on every host",
        f"F:1 b: has torch 1.13.1, a has {torch}; install torch {torch} on every host",
        f"F:1 b: has peft none, a has {own['peft']}; install peft {own['peft']} on every host",
    ]


def test_hosts_with_other_code_of_the_same_version_are_refused_by_the_first_file(tmp_path):
    code = {**hash_source_files(), "launch/agent.py": "0" * 12, "world.py": "0" * 12}
    (said,) = [str(fault) for _, fault in iter_host_faults([peer("a"), peer("b", digests=code)], tmp_path)]
    assert said == (
        f"F:1 b: has other code of dstrain {__version__} than this host: launch/agent.py and 1 more; "
        "install the same build on every host, or share the folder"
    )


def test_versions_are_told_without_importing_anything_heavy():
    assert set(read_package_versions()) == {"Python", "dstrain", "torch", "deepspeed", "transformers", "peft"}
    assert list(iter_version_diffs({"a": "1", "b": "2"}, {"a": "1"})) == [("b", "2", "none")]
    assert find_source_diff({"x": "1", "y": "2"}, {"y": "2", "z": "3"}) == ("x", 2)
    assert find_source_diff(hash_source_files(), dict(hash_source_files())) == ("", 0)
    assert {"launch/multihost/probe.py", "ds_configs/zero2.json"} <= hash_source_files().keys()
    assert not [name for name in hash_source_files() if name.startswith("launchers/")]
    assert len(hash_source_tree()) == 12


RANK = """
import json, os, sys
from pathlib import Path
names = ("HF_TOKEN", "RANK", "WORLD_SIZE", "MASTER_PORT", "DSTRAIN_AGENT", "OMP_NUM_THREADS")
Path(sys.argv[1]).write_text(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_a_rank_gets_the_environment_from_its_agent_and_no_file_has_it(launch, tmp_path, monkeypatch):
    """All the way: the launching process, an ssh session, the agent, a rank."""
    seen = tmp_path / "seen.json"
    ready = replace(launch("here slots=1\n"), argv=[sys.executable, "-c", RANK, str(seen)])
    with open_worker_group(ready, tmp_path / "run") as group:
        group.start()
        until = time.monotonic() + 60
        while group.alive_ranks:
            assert time.monotonic() < until
            group.poll()
            time.sleep(0.02)
        found = json.loads(seen.read_text())
        assert ([end.status for end in group.ends.values()], group.kill()) == ([0], [])
    assert (found["HF_TOKEN"], found["RANK"], found["WORLD_SIZE"], found["DSTRAIN_AGENT"]) == ("secret", "0", "1", "5")
    assert found["MASTER_PORT"].isdecimal()
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in kept if b"secret" in path.read_bytes()]


def test_the_next_launch_removes_what_a_killed_one_left(tmp_path):
    folder = get_workers_dir(tmp_path)
    folder.mkdir()
    for name in ("seen-0123", "rank-00000.json", "status-0123"):
        (folder / name).write_text("{}")
    remove_worker_files(tmp_path, [1])
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.json", "status-0123"]
