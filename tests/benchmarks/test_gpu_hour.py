"""The first hour on a GPU: every file of tests/gpu has a stage, and the page compares with what is published."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_hour import STAGES, compare_speed, write_page
from tests.workers import ROOT


def test_every_gpu_test_has_one_stage() -> None:
    rest = STAGES[-1].command
    named = [word for stage in STAGES[:-1] for word in stage.command if word.startswith("tests/gpu/")]
    assert sorted(named) == sorted(word for word in rest if word.startswith("tests/gpu/"))
    assert "tests/gpu" in rest
    assert all((ROOT / name).is_file() for name in named)


def test_the_page_compares_with_published_figures(tmp_path: Path) -> None:
    measured = {"shape": "8b", "variant": "as it is", "tokens_per_second": 12_000.0, "mfu": 0.203, "note": None}
    failed = {"shape": "1b", "variant": "as it is", "tokens_per_second": None, "mfu": None, "note": "out of memory"}
    file = tmp_path / "speed.json"
    file.write_text(json.dumps({"rows": [measured, failed]}))
    table = compare_speed(file)
    assert table[2].startswith("| 8b | as it is | 12000 | 0.203 | NeMo AutoModel")
    assert table[2].endswith("| 0.50 |")
    assert "out of memory" in table[3]
    write_page(
        tmp_path, {STAGES[0].name: {"state": "exit code 0", "seconds": 9, "last": "5 passed"}}, {"date": "today"}
    )
    page = (tmp_path / "gpu-hour.md").read_text()
    assert f"| {STAGES[0].name} | exit code 0 | 9 | 5 passed |" in page
    assert f"| {STAGES[1].name} | not run |" in page
