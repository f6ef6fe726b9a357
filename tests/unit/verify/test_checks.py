"""Every check holds for families of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.verify.model import ShrunkModel
from dstrain.verify.run import CHECKS, run_checks
from dstrain.verify.zero import check_zero
from tests.cells import mark_slow
from tests.unit.verify.families import CONFIGS, shrunk, write_config, write_model

PADDED = {"qwen3_5_text", "mamba2", "lfm2", "gemma3"}
"""Families whose batches are padded today."""
REPEATED = ("gemma3_text", "gpt_oss", "idefics3")
"""Families for which gemma3, qwen3_moe and llava stand."""
ONE_PROCESS = {name: check for name, check in CHECKS.items() if check is not check_zero}


@pytest.mark.parametrize("family", mark_slow(CONFIGS, REPEATED))
def test_every_promise_holds(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.verify.run.CHECKS", ONE_PROCESS)
    small = shrunk(write_config(family, tmp_path / "base"), tmp_path / "work")
    results = {result.check: result for result in run_checks(small)}
    assert [*results] == [*ONE_PROCESS]
    assert {name: result.reason for name, result in results.items() if not result.holds} == {}
    assert results["padded rows"].figure is not None
    packed = results["packed rows"]
    assert packed.state == ("padded" if family in PADDED else "ok")
    assert bool(packed.reason)
    assert (results["router loss"].state == "ok") is (family in ("qwen3_moe", "gpt_oss"))
    assert (results["LoRA adapters"].state == "refused") is (family == "mamba2")


@pytest.fixture(scope="module")
def llama_with_weights(tmp_path_factory: pytest.TempPathFactory) -> ShrunkModel:
    folder = tmp_path_factory.mktemp("llama")
    return shrunk(write_model("llama", folder / "base"), folder / "work")


def test_names_are_compared_with_the_users_files(llama_with_weights: ShrunkModel) -> None:
    result = CHECKS["names, shapes, dtypes"](llama_with_weights)
    assert not isinstance(result, list)
    assert result.state == "ok", result.reason  # type: ignore[union-attr]
    assert "as in the 39 tensors of" in result.reason  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "llava"])
def test_zero_runs_in_processes_of_its_own(family: str, tmp_path: Path) -> None:
    results = check_zero(shrunk(write_config(family, tmp_path / "base"), tmp_path / "work"))
    assert [(one.check, one.state) for one in results] == [("ZeRO 2", "ok"), ("ZeRO 3", "ok")], results
