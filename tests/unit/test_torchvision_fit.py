"""Which torchvision fits torch, and what is said where it is missing, another one, or does not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dstrain import cli, torchvision_fit
from dstrain.commands import environment
from dstrain.torchvision_fit import (
    explain_import_error,
    find_missing_package,
    find_torchvision_problem,
    get_fitting_version,
    make_torchvision_fix,
)
from tests.tiny import tiny_recipe
from tests.vocabulary import write_recipe

TORCH = "2.13.0+cpu"
BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")'
COULD_NOT = ImportError("Could not import module 'AutoProcessor'. Are this object's requirements defined correctly?")


def install(monkeypatch: pytest.MonkeyPatch, torchvision: str | None, torch: str = TORCH) -> None:
    versions = {"torch": torch, "torchvision": torchvision}
    monkeypatch.setattr(torchvision_fit, "installed_version", versions.get)
    monkeypatch.setattr(environment, "installed_version", versions.get)


def write_broken(folder: Path, version: str) -> Path:
    """Write a torchvision that does not load, as pip would install it."""
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision/__init__.py").write_text(BROKEN)
    (folder / f"torchvision-{version}.dist-info").mkdir()
    (folder / f"torchvision-{version}.dist-info/METADATA").write_text(f"Name: torchvision\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("torch", "fitting"),
    [("2.8.0", "0.23"), ("2.13.0+cpu", "0.28"), ("2.14.1", "0.29"), ("2.15.0.dev1+cu130", "0.30"), ("3.0.0", None)],
)
def test_each_torch_has_one_torchvision(torch: str, fitting: str | None) -> None:
    assert get_fitting_version(torch) == fitting


@pytest.mark.parametrize(
    ("torchvision", "torch", "problem"),
    [
        ("0.28.0", "2.13.0", None),
        ("0.28.1+cpu", "2.13.0+cpu", None),
        ("0.29.1", "2.13.0+cpu", "torchvision 0.29.1 does not fit torch 2.13.0+cpu"),
        ("0.2.0", "2.13.0", "torchvision 0.2.0 does not fit torch 2.13.0"),
        (None, "2.13.0", "torchvision is not installed"),
    ],
)
def test_versions_are_compared(
    torchvision: str | None, torch: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, torchvision, torch)
    assert find_torchvision_problem(loads=False) == problem


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        ("2.14.1", 'run pip install "dstrain[torchvision]" "torchvision==0.29.*"'),
        (
            "2.13.0+cpu",
            'run pip install "dstrain[torchvision]" "torchvision==0.28.*" '
            "--extra-index-url https://download.pytorch.org/whl/cpu",
        ),
    ],
)
def test_the_fix_is_a_command_for_this_build_of_torch(
    torch: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, None, torch)
    assert make_torchvision_fix() == command


def test_one_that_does_not_load_is_behind_a_failed_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.28.0")
    monkeypatch.syspath_prepend(write_broken(tmp_path, "0.28.0"))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    told = (
        "torchvision 0.28.0 cannot be loaded beside torch 2.13.0+cpu (operator torchvision::nms does not exist); "
        'run pip install "dstrain[torchvision]"'
    )
    assert str(explain_import_error(COULD_NOT)).startswith(told)
    assert str(find_missing_package(COULD_NOT)).startswith("its processor needs torchvision: torchvision 0.28.0 cannot")
    assert explain_import_error(ValueError("torchvision")) is None


def test_other_failed_imports_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert explain_import_error(COULD_NOT) is None
    assert find_missing_package(COULD_NOT) is None
    assert find_missing_package(ImportError("Package `num2words` is required to run SmolVLM processor.")) == (
        "its processor needs num2words, which is not installed"
    )


def test_the_environment_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.28.0")
    assert environment._torchvision() == environment.EnvironmentLine("torchvision", "0.28.0, with torch 2.13.0+cpu")
    install(monkeypatch, "0.29.1")
    assert 'does not fit torch 2.13.0+cpu; run pip install "dstrain[torchvision]"' in environment._torchvision().warning
    install(monkeypatch, None)
    assert environment._torchvision().value.startswith("not installed; processors of many image-text models need it")
    assert not environment._torchvision().warning


def test_a_command_names_it_and_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.29.1")

    def fail(_: object) -> None:
        raise COULD_NOT

    monkeypatch.setattr("dstrain.commands.lists.list_tasks", fail)
    done = CliRunner().invoke(cli.main, ["tasks"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: torchvision 0.29.1 does not fit torch 2.13.0+cpu; run pip install")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_ends_with_2_where_torchvision_does_not_load(tmp_path: Path) -> None:
    from importlib.metadata import version

    fitting = f"{get_fitting_version(version('torch'))}.0"
    recipe = write_recipe(tmp_path, tiny_recipe("rm", tmp_path))
    path = os.pathsep.join([str(write_broken(tmp_path / "packages", fitting)), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dstrain", "train", str(recipe), "--run-dir", str(tmp_path / "run")]
    environ = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"torchvision {fitting} cannot be loaded beside torch" in done.stderr
    assert 'run pip install "dstrain[torchvision]"' in done.stderr
