"""Wrong input of any kind: exit code 2, a message with place and fix, no traceback, nothing written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.tasks import find_task
from tests.contract.wrong_inputs import ALL, PLAIN

LAUNCHER_VARIABLES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "DSTRAIN_DEBUG",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe in it; a launch would fail the test."""
    values = find_task("rm").tiny(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def never(*arguments: Any) -> int:
        raise AssertionError("something was launched")

    monkeypatch.setattr("dstrain.launch.supervise.supervise", never)
    return tmp_path


def listing(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        yield str(path), path.lstat().st_mtime_ns


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_input_is_refused_with_a_sentence(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ALL[name]
    wrong.write_files(folder)
    for variable, value in wrong.env.items():
        monkeypatch.setenv(variable, value)
    before = list(listing(folder))
    result = CliRunner().invoke(main, wrong.words)
    said = PLAIN.sub(" ", result.output)
    assert result.exit_code == 2, said[-1000:]
    assert "Traceback" not in said
    assert "unexpected" not in said.replace("unexpected end", "")
    assert re.search(wrong.message, said), said[-1000:]
    assert list(listing(folder)) == before, "nothing was written"
