"""Every check holds for families of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from dstrain.config.schema import ModelConfig
from dstrain.errors import RecipeError
from dstrain.verify.exports import (
    StoredTensor,
    check_export,
    check_names,
    compare_headers,
    map_to_small,
    read_base_headers,
)
from dstrain.verify.model import ShrunkModel, make_shrunk_model
from dstrain.verify.rows import check_packed_rows, check_padded_rows
from dstrain.verify.run import CHECKS, run_checks
from dstrain.verify.zero import check_zero
from tests.cells import mark_slow
from tests.unit.verify.families import CONFIGS, shrunk, write_config, write_model

PADDED = {"mamba2", "gemma3"}
"""Families whose batches are padded today."""
REPEATED = ("gemma3_text", "gpt_oss", "idefics3", "llava", "lfm2")
"""Families for which gemma3, qwen3_moe and qwen3_5_text stand."""
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


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_only_on_request(tmp_path: Path) -> None:
    base = write_config("llama", tmp_path / "base")
    (base / "modeling_own.py").write_text(CODE)
    config = json.loads((base / "config.json").read_text())
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (base / "config.json").write_text(json.dumps(config | {"model_type": "own_llama", "auto_map": classes}))
    with pytest.raises(RecipeError, match=r"trust_remote_code"):
        shrunk(base, tmp_path / "refused")
    small = make_shrunk_model(ModelConfig(path=str(base), trust_remote_code=True), tmp_path / "work")
    assert type(small.config).__name__ == "OwnConfig"
    assert check_padded_rows(small).state == "ok"
    packed = check_packed_rows(small)
    assert packed.state == "padded"
    assert "code" in packed.reason
    assert check_export(small).state == "ok"


def test_a_reward_models_head_is_another_one(tmp_path: Path) -> None:
    base = write_model("llama", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].clone()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert check_names(shrunk(base, tmp_path / "work")).state == "ok"


def test_the_headers_of_a_hub_model_are_read(llama_with_weights: ShrunkModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names alone are asked for, not the weights."""
    import huggingface_hub
    from huggingface_hub import constants

    tensor = SimpleNamespace(dtype="BF16", shape=[4, 2])
    files = {"model.safetensors": SimpleNamespace(tensors={"lm_head.weight": tensor})}
    asked = []

    def get(name: str, revision: str | None) -> SimpleNamespace:
        asked.append((name, revision))
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", get)
    found = read_base_headers(ModelConfig(path="org/name", revision="v1"))
    assert found == {"lm_head.weight": StoredTensor((4, 2), "BF16")}
    assert asked == [("org/name", "v1")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_base_headers(ModelConfig(path="org/name", revision="v1")) == {}


def test_layers_and_experts_that_the_small_model_lacks_are_left_out() -> None:
    name, one = "model.layers.{}.mlp.experts.{}.up_proj.weight", StoredTensor((4, 2), "BF16")
    small = {name.format(layer, expert): one for layer in range(2) for expert in range(3)}
    large = {name.format(layer, expert): one for layer in range(9) for expert in range(8)}
    assert map_to_small(large | {"model.norm.weight": one}, small).keys() == {*small, "model.norm.weight"}
    assert compare_headers(small, map_to_small(large, small), small, set()) == []
    lost = {key: value for key, value in small.items() if ".layers.1." not in key}
    (problem,) = compare_headers(lost, map_to_small(large, small), small, set())
    assert problem.startswith("the export lacks model.layers.1.mlp.experts.0.up_proj.weight")
