"""Scripts in launchers/: what they start, word by word, and what they refuse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dstrain.cli import main
from dstrain.config.schema import RunConfig
from dstrain.launch.hostfile import parse_hostfile
from dstrain.resources import find_resource_dir
from tests.workers import ROOT

LAUNCHERS = ROOT / "launchers"
SCRIPTS = [path for path in sorted(LAUNCHERS.iterdir()) if path.suffix == ".sh"]
STUB = """#!/bin/sh
case " $* " in
    *visible_gpus*) echo 8 ;;
    *free_port*) echo 4711 ;;
    *find_resource_dir*) echo "$LAUNCHERS" ;;
    *) for word in "${0##*/}" "$@"; do echo "$word"; done; env >"$SEEN"; exit "${CODE:-0}" ;;
esac
"""
"""Says its words; answers what scripts ask Python for."""


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs that launchers start are stubs that say their words."""
    for name in ("python", "dstrain", "deepspeed"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "LAUNCHERS": str(LAUNCHERS), "SEEN": str(tmp_path / "seen")}


def start(words: list[str], stubs: Mapping[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env={**stubs, **env}, capture_output=True, text=True, timeout=60)


def launched(script: str, words: str, stubs: Mapping[str, str], **env: str) -> str:
    """What a launcher ends up starting."""
    done = start([str(LAUNCHERS / script), *words.split()], stubs, **env)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def seen(stubs: Mapping[str, str]) -> dict[str, str]:
    """The environment that the last stub had."""
    return dict(line.split("=", 1) for line in Path(stubs["SEEN"]).read_text().splitlines() if "=" in line)


def options(command: str) -> set[str]:
    found = main.commands[command]
    assert isinstance(found, click.Command)
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound(script: Path) -> None:
    shell = script.read_text().splitlines()[0].removeprefix("#!/bin/")
    assert shell in ("sh", "bash")
    assert subprocess.run([shell, "-n", script], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_started_by_name_is_executable() -> None:
    assert {path.name for path in LAUNCHERS.iterdir() if os.access(path, os.X_OK)} == {
        "deepspeed",
        *(path.name for path in SCRIPTS),
    }


def test_hostfile_sh_is_dstrain_with_a_hostfile(stubs: dict[str, str]) -> None:
    assert launched("hostfile.sh", "hosts r.yaml --set seed=1", stubs) == (
        "dstrain train r.yaml --hostfile hosts --set seed=1"
    )
    assert "--hostfile" in options("train")


@pytest.mark.parametrize("words", [[], ["hosts"]])
def test_hostfile_sh_wants_a_hostfile_and_a_recipe(words: list[str], stubs: dict[str, str]) -> None:
    done = start([str(LAUNCHERS / "hostfile.sh"), *words], stubs)
    assert done.returncode == 2
    assert "usage: " in done.stderr
    assert "HOSTFILE RECIPE" in done.stderr


TORCHRUN = "python -m torch.distributed.run"
WAYS: dict[str, tuple[dict[str, str], str]] = {
    "all GPUs of one machine": (
        {}, "--nnodes 1 --nproc-per-node 8 --node-rank 0 --master-addr 127.0.0.1 --master-port 4711",
    ),
    "some of one machine": (
        {"GPUS": "2", "MASTER_PORT": "29501"},
        "--nnodes 1 --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29501",
    ),
    "the second of two machines": (
        {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host1"},
        "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr host1 --master-port 29500",
    ),
    "with restarts": (
        {"RESTARTS": "3"},
        "--nnodes 1 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:4711 --rdzv-id dstrain "
        "--max-restarts 3 --local-addr 127.0.0.1",
    ),
    "two machines with restarts": (
        {"RESTARTS": "3", "NODES": "2", "MASTER_ADDR": "host1"},
        "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host1:29500 --rdzv-id dstrain --max-restarts 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_torchrun_sh_is_torchrun(way: str, stubs: dict[str, str]) -> None:
    env, place = WAYS[way]
    assert launched("torchrun.sh", "r.yaml --set seed=1", stubs, **env) == (
        f"{TORCHRUN} {place} -m dstrain.cli train r.yaml --set seed=1"
    )
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in seen(stubs)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in seen(stubs)) == ("RESTARTS" in env)


def test_torchrun_sh_tells_torchrun_and_the_run_how_long_a_stop_may_take(stubs: dict[str, str]) -> None:
    said = launched("torchrun.sh", "r.yaml", stubs, GPUS="2", GRACE="60")
    assert said.endswith("-m dstrain.cli train --set launch.grace_seconds=60 r.yaml")
    assert seen(stubs)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "60"
    assert "grace_seconds" in type(RunConfig.model_fields["launch"].default).model_fields


@pytest.mark.parametrize(
    "env", [{"NODE_RANK": "1"}, {"MASTER_ADDR": "host1"}, {"NODE_RANK": "1", "RESTARTS": "2"}], ids=str
)
def test_torchrun_sh_wants_to_know_where_several_machines_meet(env: dict[str, str], stubs: dict[str, str]) -> None:
    done = start([str(LAUNCHERS / "torchrun.sh"), "r.yaml"], stubs, NODES="2", **env)
    assert done.returncode == 2
    assert "NODES=2 needs MASTER_ADDR" in done.stderr


@pytest.mark.slow
def test_torchrun_sh_gives_torchrun_options_that_it_has(stubs: dict[str, str]) -> None:
    asked = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True)
    given = {word for _, place in WAYS.values() for word in place.split() if word.startswith("--")}
    assert given <= set(re.findall(r"--[a-z-]+", asked.stdout))


def test_the_hostfile_in_the_folder_is_one() -> None:
    hosts = parse_hostfile((LAUNCHERS / "hostfile.example").read_text(), "F")
    assert [(host.name, len(host.slots)) for host in hosts] == [("host1", 8), ("host2", 8)]


def test_windows_bat_is_for_windows_and_names_what_exists() -> None:
    text = (LAUNCHERS / "windows.bat").read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n") > 5
    assert text.endswith(b"exit /b 2\r\n")
    said = text.decode("ascii")
    for command, recipe in re.findall(r"dstrain ([a-z]+) ([a-z-]+)\r", said):
        assert command in main.commands
        assert (ROOT / f"dstrain/recipes/{recipe}.yaml").is_file()
    (target,) = re.findall(r"make ([a-z-]+)\r", said)
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    (packages,) = re.findall(r"apt-get install (.*)\r", said)
    assert f"apt-get install {packages}" in (ROOT / "README.md").read_text()


def pod() -> dict[str, Any]:
    """What all pods of the Kubernetes example are made by."""
    claim, job = yaml.safe_load_all((LAUNCHERS / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    assert {spec["restartPolicy"] for spec in replicas.values()} == {"OnFailure"}
    made = replicas["Master"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in made["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert {mount["name"] for mount in made["containers"][0]["volumeMounts"]} == set(volumes)
    return made


OPERATORS = {
    "with PET_": {"PET_NNODES": "4", "PET_NODE_RANK": "2", "WORLD_SIZE": "32", "RANK": "2"},
    "without": {"WORLD_SIZE": "4", "RANK": "2"},
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_pod_starts_its_share_of_the_run(operator: str, stubs: dict[str, str]) -> None:
    (container,) = pod()["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    env = {**OPERATORS[operator], "MASTER_ADDR": "dstrain-master-0", "MASTER_PORT": "23456", **given}
    done = start([*container["command"], *container["args"]], stubs, **env)
    assert " ".join(done.stdout.split()) == (
        f"{TORCHRUN} --nnodes 4 --nproc-per-node 8 --node-rank 2 --master-addr dstrain-master-0 --master-port 23456 "
        f"-m dstrain.cli train --set launch.grace_seconds={given['GRACE']} /shared/recipe.yaml --run-dir /shared/runs/one"
    ), done.stderr
    assert seen(stubs)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == given["GRACE"]


def container_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The container of an example, and the pod's own settings."""
    job = yaml.safe_load((LAUNCHERS / name).read_text())["spec"]
    if name == "trainjob.yaml":
        return job["trainer"], job["podTemplateOverrides"][0]["spec"]
    made = job["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return made["containers"][0], made


PET = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "dstrain-node-0-0.dstrain", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("trainjob.yaml", {f"PET_{key}": value for key, value in PET.items()}),
        ("jobset.yaml", {"JOB_COMPLETION_INDEX": "2"}),
    ],
)
def test_a_node_of_another_operator_starts_its_share_of_the_run(
    name: str, env: dict[str, str], stubs: dict[str, str]
) -> None:
    container, made = container_of(name)
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    done = start([*container["command"], *container["args"]], stubs, **env, **given)
    assert " ".join(done.stdout.split()) == (
        f"{TORCHRUN} --nnodes 4 --nproc-per-node 8 --node-rank 2 --master-addr dstrain-node-0-0.dstrain --master-port "
        f"29500 -m dstrain.cli train --set launch.grace_seconds={given['GRACE']} /shared/recipe.yaml --run-dir "
        "/shared/runs/one"
    ), done.stderr
    assert 0 < int(given["GRACE"]) < made.get("terminationGracePeriodSeconds", 30), "Kubernetes' default"
    assert {volume["name"] for volume in made["volumes"]} == {"shared", "shm"}


def test_a_pod_has_time_for_its_checkpoint_and_options_that_exist() -> None:
    made = pod()
    (container,) = made["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert 0 < int(env["GRACE"]["value"]) < made["terminationGracePeriodSeconds"]
    assert set(re.findall(r"--[a-z-]+", container["args"][0])) <= options("train")
    assert "secretKeyRef" in env["HF_TOKEN"]["valueFrom"]
    assert "value" not in env["HF_TOKEN"], "no secret stands in the file"


def test_the_folder_is_found_where_it_ships() -> None:
    assert find_resource_dir("launchers") == LAUNCHERS


def test_what_launchers_ask_python_for_is_there() -> None:
    snippets = {
        found
        for path in [*LAUNCHERS.iterdir(), ROOT / "Makefile"]
        if path.is_file()
        for found in re.findall(r"-c '([^']*\bdstrain\b[^']*)'", path.read_text())
    }
    assert len(snippets) >= 4
    for snippet in snippets:
        subprocess.run([sys.executable, "-c", snippet], check=True, stdout=subprocess.DEVNULL, timeout=60, cwd=ROOT)
