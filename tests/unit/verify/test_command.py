"""`dstrain verify`: the table, the page, exit codes, and what is refused before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrain.commands.verify import VerifyReport, as_html, as_markdown, show_table
from dstrain.verify import run
from dstrain.verify.model import ShrunkModel
from dstrain.verify.result import CheckResult
from dstrain.verify.rows import check_padded_rows
from tests.unit.verify.families import CONFIGS, write_config, write_model
from tests.unit.verify.table import render, verify
from tests.vocabulary import invoke


def fails(shrunk: ShrunkModel) -> CheckResult:
    return CheckResult(check="packed rows", state="failed", figure=0.5, limit=1e-6, reason="a | leak <b>")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the checks by a few."""

    def choose(*chosen: run.Check) -> None:
        monkeypatch.setattr(run, "CHECKS", {f"check {number}": check for number, check in enumerate(chosen)})

    return choose


def test_a_model_that_holds_ends_with_0_and_leaves_nothing(
    tmp_path: Path, checks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks(check_padded_rows)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    write_model("llama", tmp_path / "models" / "base")
    page = tmp_path / "page.html"
    result = invoke("verify", "models/base", "--to", "page.html")
    assert result.exit_code == 0, result.output
    assert "models/base: llama; checked with 2 layers of width 64" in result.output
    assert "padded rows  ok" in result.output
    assert "every promise holds" in result.output
    assert "the model's own tokenizer" in result.output
    assert "<td>padded rows</td><td>ok</td>" in page.read_text()
    assert not [*(tmp_path / "tmp").iterdir()]
    assert not (tmp_path / "cache").exists(), "the user's cache"
    assert os.environ["DSTRAIN_CACHE"] == str(tmp_path / "cache")


def test_a_promise_that_does_not_hold_ends_with_1(tmp_path: Path, checks: Callable[..., None]) -> None:
    checks(fails)
    page = tmp_path / "page.md"
    result = invoke("verify", str(write_config("llama", tmp_path / "base")), "--json", "--to", str(page))
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["holds"] is False
    assert told["results"][0]["state"] == "failed"
    assert "1 of 1 checks failed: packed rows" in " ".join(page.read_text().lower().split())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["MISSING"], "give an existing folder or a hub id"),
        (["BASE", "--to", "page.txt"], "name a file that ends in .md or .html"),
        (["BASE", "--to", "nowhere/page.md"], "there is no folder nowhere"),
        (["BASE", "--set", "optim.lr=1"], "verify takes model.revision"),
        (["EMPTY"], "config.json"),
        (["T5"], "with an encoder and a decoder"),
        (["org/name"], "HF_HUB_OFFLINE forbids a download"),
    ],
)
def test_bad_input_ends_with_2(
    words: list[str], wanted: str, tmp_path: Path, checks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from transformers import AutoConfig

    checks(fails)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    write_config("llama", tmp_path / "base")
    (tmp_path / "empty").mkdir()
    AutoConfig.for_model("t5").save_pretrained(str(tmp_path / "t5"))
    places = {"BASE": "base", "MISSING": "./missing", "EMPTY": "empty", "T5": "t5"}
    result = invoke("verify", *(str(tmp_path / places[word]) if word in places else word for word in words))
    assert result.exit_code == 2, result.output
    assert wanted in " ".join(result.output.split())


def test_a_text_in_a_result_does_not_break_the_page() -> None:
    report = VerifyReport(
        model="m", model_type="llama", small_model="2 layers", results=[fails(None)],  # type: ignore[arg-type]
        versions="torch 2", cores=2, date="2026-11-29", seconds=1.0,
    )  # fmt: skip
    assert "a \\| leak" in as_markdown(report)
    assert "leak &lt;b&gt;" in as_html(report)
    assert "packed rows  FAILED  5.0e-01 (limit 1e-06)  a | leak" in show_table(report)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_families_hold_with_the_whole_command() -> None:
    reports = [verify(family) for family in CONFIGS]
    assert len(reports) == 10
    assert {report.model_type: report.verdict for report in reports if not report.holds} == {}
    assert {len(report.results) for report in reports} == {13}
    page = render(reports, "0" * 8)
    assert "| ZeRO 3 |" in page
