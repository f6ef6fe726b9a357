"""Faults of public trainers and models, planted into a small model or its export, are found by the check of their kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_moe import modeling_qwen3_moe

from dstrain.training import export_folder
from dstrain.verify import adapters, exports, rows, zero
from dstrain.verify.adapters import check_lora, check_quantized
from dstrain.verify.exports import check_export, check_names, check_resized_embeddings, check_tied_embeddings
from dstrain.verify.model import ShrunkModel
from dstrain.verify.result import CheckResult
from dstrain.verify.router import check_router
from dstrain.verify.rows import check_left_padding, check_packed_rows, check_padded_rows, check_shared_prompts
from tests.unit.verify.families import shrunk, write_config, write_model

MakeModel = Callable[[str], ShrunkModel]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Small models by family, each made once; `llama` has weights."""
    made: dict[str, ShrunkModel] = {}

    def make(family: str) -> ShrunkModel:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            write = write_model if family == "llama" else write_config
            made[family] = shrunk(write(family, folder / "base"), folder / "work")
        return made[family]

    return make


def assert_failed(result: CheckResult, words: str) -> None:
    assert result.state == "failed", result
    assert words in result.reason


def test_a_layer_whose_state_goes_on_through_the_row_is_found(
    small: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA-NeMo/Automodel 2131: a recurrent layer that ignores the resets of a packed row."""
    forward = LlamaMLP.forward

    def with_state(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(self, hidden)
        return out + 0.1 * out.cumsum(1)

    monkeypatch.setattr(LlamaMLP, "forward", with_state)
    assert check_padded_rows(small("llama")).holds
    assert_failed(check_packed_rows(small("llama")), "the other rows of a batch")
    assert_failed(check_shared_prompts(small("llama")), "the other rows of a batch")
    assert_failed(check_left_padding(small("llama")), "the padding before a prompt")


def test_a_gradient_alone_that_sees_other_rows_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaMLP.forward

    def with_leak(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(self, hidden)
        state = 0.1 * out.cumsum(1)
        return out + state - state.detach()

    monkeypatch.setattr(LlamaMLP, "forward", with_leak)
    assert_failed(check_packed_rows(small("llama")), "gradients differ")


def test_padding_on_the_left_that_enters_a_state_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """AI-Hypercomputer/maxtext 5295."""
    assert check_left_padding(small("mamba2")).holds
    monkeypatch.setattr(modeling_mamba2, "apply_mask_to_padding_states", lambda hidden, mask: hidden)
    assert_failed(check_left_padding(small("mamba2")), "the padding before a prompt")


def after_export(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]) -> None:
    """Let `change` edit the folder of each export."""

    def write(model: Any, folder: Path, *rest: Any) -> None:
        export_folder.write_model_folder(model, folder, *rest)
        change(folder)

    monkeypatch.setattr(exports, "write_model_folder", write)


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return edit


def test_a_head_that_an_export_unties_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def untie(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))

    assert check_tied_embeddings(small("gemma3_text")).holds
    after_export(monkeypatch, untie)
    assert_failed(check_tied_embeddings(small("gemma3_text")), "one matrix here, and not after the export")
    assert_failed(check_export(small("gemma3_text")), "transformers computes something else")


RENAMED = {
    "a renamed prefix": lambda found: {
        name.replace("model.", "model.language_model."): one for name, one in found.items()
    },
    "a lost tensor": lambda found: {
        name: one for name, one in found.items() if name != "model.layers.1.mlp.up_proj.weight"
    },
    "another dtype": lambda found: {
        name: one.float() if name == "model.norm.weight" else one for name, one in found.items()
    },
    "a transposed tensor": lambda found: {
        name: one.t().contiguous() if name.endswith("down_proj.weight") else one for name, one in found.items()
    },
    "another rank": lambda found: {name: one[None] if name == "lm_head.weight" else one for name, one in found.items()},
}
FOUND = {
    "a renamed prefix": "which the base's files do not",
    "a lost tensor": "the export lacks model.layers.1.mlp.up_proj.weight",
    "another dtype": "model.norm.weight is F32, and BF16 in the base",
    "a transposed tensor": "down_proj.weight has the shape (128, 64)",
    "another rank": "lm_head.weight has 3 dimensions, and 2 in the base",
}


@pytest.mark.parametrize("fault", RENAMED)
def test_tensors_that_are_not_the_bases_are_found(
    fault: str, small: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ahydchh/Impromptu-VLA 52: names that servers do not read."""
    after_export(monkeypatch, edit_tensors(RENAMED[fault]))
    result = check_names(small("llama"))
    assert result.state == "failed"
    assert FOUND[fault] in result.reason


def test_adapters_that_the_forward_pass_leaves_out_are_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = peft.tuners.lora.layer.Linear
    monkeypatch.setattr(layer, "forward", lambda self, hidden, *rest, **more: self.base_layer(hidden))
    assert_failed(check_lora(small("llama")), "does not apply the adapters")


def test_adapters_that_one_kind_of_layer_leaves_out_are_found(
    small: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LlamaMLP,
        "forward",
        lambda self, hidden: hidden @ self.up_proj.base_layer.weight.t() @ self.down_proj.base_layer.weight.t(),
    )
    assert_failed(check_lora(small("llama")), "get no gradient in any layer")


def test_adapters_that_a_merge_loses_are_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "merge_adapters", lambda model: model.unload())
    assert_failed(check_lora(small("llama")), "the merged model computes something else")


def test_a_step_that_changes_the_base_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step = adapters.TorchEngine.step

    def step_and_more(self: Any, *rest: Any, **more: Any) -> Any:
        result = step(self, *rest, **more)
        with torch.no_grad():
            next(self.train_module.model.parameters()).add_(1e-3)
        return result

    monkeypatch.setattr(adapters.TorchEngine, "step", step_and_more)
    assert_failed(check_lora(small("llama")), "has changed the base's")


def test_quantized_layers_with_other_values_are_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    import bitsandbytes

    dequantize = bitsandbytes.functional.dequantize_4bit
    assert check_quantized(small("llama")).holds
    calls = iter(range(10**6))

    def wrong_once(*rest: Any, **more: Any) -> torch.Tensor:
        found: torch.Tensor = dequantize(*rest, **more)
        return found * 1.01 if next(calls) == 3 else found

    wrong_once.__wrapped__ = dequantize  # type: ignore[attr-defined]
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", wrong_once)
    assert_failed(check_quantized(small("llama")), "the quantized layers do not compute")


def test_stale_rows_of_a_resized_embedding_are_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found["model.embed_tokens.weight"][-exports.NEW_TOKENS :] = 0
        return found

    assert check_resized_embeddings(small("llama")).holds
    after_export(monkeypatch, edit_tensors(forget))
    assert_failed(check_resized_embeddings(small("llama")), "do not have the rows of the added tokens")


def test_an_export_with_the_bases_values_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_file(small("llama").folder / "model.safetensors")
    after_export(monkeypatch, edit_tensors(lambda found: base))
    assert_failed(check_export(small("llama")), "transformers computes something else")


def test_a_routers_loss_that_counts_padding_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    function = modeling_qwen3_moe.load_balancing_loss_func

    def without_mask(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        return function(gate_logits, num_experts, top_k, None)

    assert check_router(small("qwen3_moe")).holds
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", without_mask)
    assert_failed(check_router(small("qwen3_moe")), "padding or other sequences are counted")


def test_a_step_of_zero_that_differs_is_found(small: MakeModel, tmp_path: Path) -> None:
    expected = {"weight": torch.tensor([1.0, 2.0])}
    save_file({"weight": torch.tensor([1.0, 2.1])}, tmp_path / zero.WEIGHTS_FILE.format(stage=2))
    assert_failed(zero.compare_updates(tmp_path, 2, expected, ""), "most in weight")
    assert_failed(
        zero.compare_updates(tmp_path, 3, expected, "the process of rank 1 ended"), "the process of rank 1 ended"
    )


def test_a_family_that_raises_is_a_failed_check(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrain.verify import run

    def broken(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("token_type_ids\nrequired")

    monkeypatch.setattr(LlamaMLP, "forward", broken)
    monkeypatch.setattr(run, "CHECKS", {"padded rows": rows.check_padded_rows})
    (result,) = run.run_checks(small("llama"))
    assert_failed(result, "RuntimeError: token_type_ids required")


def test_an_answer_that_differs_later_is_found(small: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = rows._generate

    def with_other_end(task: Any, model: Any, prompts: Any, batch: int) -> list[list[int]]:
        answers = generate(task, model, prompts, batch)
        return [[*answer, 0] for answer in answers] if batch > 1 else answers

    monkeypatch.setattr(rows, "_generate", with_other_end)
    assert_failed(check_left_padding(small("llama")), "later tokens of an answer differ")
