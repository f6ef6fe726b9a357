"""The wheel holds all that is shipped, and works in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.workers import ROOT

SHIPPED = ("dstrain", "ds_configs", "launchers", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((copy / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_everything_that_is_shipped_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("ds_configs", "launchers"):
        for path in (ROOT / folder).iterdir():
            assert f"dstrain/{folder}/{path.name}" in inside
    assert {"dstrain/report/page/page.css", "dstrain/report/page/page.js"} <= inside
    for path in (ROOT / "dstrain" / "recipes").rglob("*.*"):
        if "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in inside
    assert "dstrain/ds_keys.json" in inside
    assert not [name for name in inside if name.startswith("tests/")]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(["presets"], "zero3_nvme"), (["presets", "zero2"], "zero_optimization"), (["recipes", "demo-rm"], "task: rm"),
     (["tasks", "rm"], "label_smoothing"), (["train", "demo-rm", "--dry-run"], "dstrain/recipes/demo-rm/train.jsonl"),
     (["train", "demo-vlm", "--dry-run"], "dstrain/recipes/demo-vlm/train.jsonl")],
)  # fmt: skip
def test_it_works_in_an_empty_folder(arguments: list[str], wanted: str, installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import dstrain; print(dstrain.__file__)"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(installed)), "the installed one, not the checkout"
    done = subprocess.run(
        [sys.executable, "-m", "dstrain", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_launcher_stays_executable(installed: Path) -> None:
    assert os.access(installed / "dstrain/launchers/deepspeed", os.X_OK)
