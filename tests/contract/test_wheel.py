"""Wheel and sdist hold all that is shipped and no more, and an installed wheel works outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.cells import SLOW
from tests.workers import ROOT

SHIPPED = ("dstrain", "ds_configs", "launchers", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it. From a copy, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, *["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]]
    subprocess.run([*pip, str(folder), str(wheel)], check=True, capture_output=True)
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
    assert "dstrain/py.typed" in inside
    tops = {name.partition("/")[0] for name in inside}
    assert {top.partition("-")[0] for top in tops} == {"dstrain"}, "neither tests nor docs"


def test_the_sdist_holds_the_package_and_what_is_needed_to_build_it(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "dstrain/py.typed"} <= inside
    assert {f"ds_configs/{path.name}" for path in (ROOT / "ds_configs").iterdir()} <= inside
    assert {f"launchers/{path.name}" for path in (ROOT / "launchers").iterdir()} <= inside
    assert not [name for name in inside if name.startswith(("tests", "docs", "benchmarks", "tools"))]


def test_the_metadata_says_what_an_index_shows(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    found = Parser().parsestr(archive.read(name).decode())
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Summary"]
    assert found["Keywords"]
    assert found["Requires-Python"]
    assert found["Description-Content-Type"] == "text/markdown"
    classifiers = found.get_all("Classifier") or []
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Typing :: Typed" in classifiers


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = "\n".join(path.read_text() for path in (ROOT / "dstrain").rglob("*.py"))


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in ("dev", "docs")])
def test_a_missing_library_is_reported_with_its_extra(extra: str) -> None:
    assert f"dstrain[{extra}]" in SOURCES


def test_the_core_installs_no_library_of_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = re.compile(r"[\w-]+")
    core = {name.match(line)[0].lower() for line in project["dependencies"]}  # type: ignore[index]
    optional = {name.match(line)[0].lower() for extra in EXTRAS.values() for line in extra}  # type: ignore[index]
    assert not core & optional


@pytest.mark.slow
def test_a_fresh_environment_with_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """A new venv; only the dependencies come from this one, by a .pth file, which does not follow an editable install."""
    venv, here = tmp_path / "venv", tmp_path / "here"
    here.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    check = subprocess.run([*pip, "check"], env=env, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout
    origin = [str(python), "-c", "import dstrain; print(dstrain.__file__)"]
    found = subprocess.run(origin, cwd=here, env=env, check=True, capture_output=True, text=True).stdout
    assert found.startswith(str(site))
    for words, wanted in (
        (["--version"], "dstrain, version"), (["plan", "demo-rm"], "zero2"), (["recipes"], "demo-vlm"),
    ):  # fmt: skip
        done = subprocess.run(
            [str(venv / "bin" / "dstrain"), *words], cwd=here, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(["presets"], "zero3_nvme"), SLOW(["presets", "zero2"], "zero_optimization"),
     SLOW(["recipes", "demo-rm"], "task: rm"), SLOW(["tasks", "rm"], "label_smoothing"), (["train", "demo-rm", "--dry-run"], "dstrain/recipes/demo-rm/train.jsonl"),
     (["train", "demo-vlm", "--dry-run"], "dstrain/recipes/demo-vlm/train.jsonl")],
)  # fmt: skip
def test_the_wheel_works_in_an_empty_folder(arguments: list[str], wanted: str, installed: Path, tmp_path: Path) -> None:
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
