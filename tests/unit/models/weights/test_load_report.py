"""What the files of a model hold is compared with its class before any value is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from dstrain.config.schema import RunConfig
from dstrain.errors import RecipeError
from dstrain.tasks import make_task
from dstrain.tasks.rm import RewardModel
from dstrain.tasks.sft import SFT

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip


def saved(at: Path, auto: Any = AutoModelForCausalLM, **settings: Any) -> Path:
    config = AutoConfig.for_model("llama", **SIZES, **settings)
    auto.from_config(config).save_pretrained(str(at))
    return at


def task_on(kind: Any, at: Path, tmp_path: Path, **more: Any) -> Any:
    values = kind.tiny(tmp_path)
    made: Any = make_task(RunConfig.model_validate(values))
    made.tokenizer.save_pretrained(str(at))
    return make_task(RunConfig.model_validate({**values, "model": {"path": str(at), **more}}))


def told(config: dict[str, Any]) -> Callable[[Path], None]:
    def change(at: Path) -> None:
        file = at / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))

    return change


def stored_as(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(at: Path) -> None:
        tensors = load_file(at / "model.safetensors")
        cast = {name: value.to(dtype) if value.dim() == 2 else value for name, value in tensors.items()}
        save_file(cast, at / "model.safetensors", metadata={"format": "pt"})

    return change


def renamed(at: Path) -> None:
    tensors = load_file(at / "model.safetensors")
    save_file({f"module.{name}": value for name, value in tensors.items()}, at / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "auto", "spoil", "wanted"),
    [
        (SFT, AutoModelForCausalLM, told({"hidden_size": 32, "head_dim": 16}), r"'lm_head\.weight' is \(320, 16\) in its files and \(320, 32\) in the model"),
        (SFT, AutoModelForCausalLM, told({"num_hidden_layers": 3}), r"lacks model\.layers\.2\.input_layernorm\.weight, .* and 6 more of a LlamaForCausalLM"),
        (RewardModel, AutoModelForCausalLM, told({"num_hidden_layers": 3}), r"lacks model\.layers\.2"),
        (SFT, AutoModelForSequenceClassification, told({}), r"lacks lm_head\.weight of a LlamaForCausalLM, which would be drawn at random; .*LlamaForSequenceClassification"),
        (SFT, AutoModel, told({}), r"lacks lm_head\.weight of a LlamaForCausalLM"),
        (RewardModel, AutoModelForSequenceClassification, told({}), r"'score\.weight' is \(2, 16\) in its files, and the task needs \(1, 16\)"),
        (RewardModel, AutoModelForCausalLM, renamed, r"lacks model\.embed_tokens\.weight"),
        (RewardModel, AutoModelForCausalLM, stored_as(torch.float8_e4m3fn), r"is stored as F8_E4M3, and its config\.json has no quantization_config"),
        (SFT, AutoModelForCausalLM, stored_as(torch.int8), r"is stored as I8"),
    ],
)  # fmt: skip
def test_files_that_do_not_hold_the_model_are_refused_by_name(
    kind: Any, auto: Any, spoil: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    at = saved(tmp_path / "model", auto)
    spoil(at)
    with pytest.raises(RecipeError, match=rf"model\.path: .*{wanted}"):
        task_on(kind, at, tmp_path).checks.run()


def test_what_is_allowed_is_said_in_sentences(tmp_path: Path) -> None:
    at = saved(tmp_path / "model", tie_word_embeddings=True)
    plain = task_on(SFT, at, tmp_path)
    plain.checks.run()
    assert not plain.checks.warnings()
    scored = task_on(RewardModel, at, tmp_path)
    scored.checks.run()
    assert not scored.checks.warnings()
    assert (
        f"new and drawn from seed 0: score.weight (the files of {at} have no such head)"
        in scored.checks.info_messages()
    )
    shutil.rmtree(at)
    tied = saved(at, AutoModelForSequenceClassification, tie_word_embeddings=True, num_labels=1)
    writer = task_on(SFT, tied, tmp_path)
    writer.checks.run()
    assert writer.checks.warnings() == [f"the model has no place for score.weight in the files of {at}: left out"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    at = saved(tmp_path / "model")
    stored_as(dtype)(at)
    task = task_on(SFT, at, tmp_path)
    task.checks.run()
    assert {p.dtype for p in task.build_model().parameters()} == {torch.float32}


def test_no_load_report_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = task_on(RewardModel, saved(tmp_path / "model"), tmp_path)
    task.checks.run()
    task.build_model()
    seen = "".join(capfd.readouterr())
    assert "LOAD REPORT" not in seen
    assert "MISSING" not in seen


def test_the_way_dialogs_are_written_is_said_where_no_template_decides(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(SFT.tiny(tmp_path)))
    [line] = task.checks.info_messages()
    assert line.startswith("the tokenizer has no chat template: dialogs are written as ")
    assert "each answer ends with <|endoftext|>" in line or "each answer ends with </s>" in line
    task.tokenizer.eos_token = None  # type: ignore[attr-defined]
    [line] = task.checks.info_messages()
    assert "nothing ends an answer" in line
    task.tokenizer.chat_template = "{{ messages }}"  # type: ignore[attr-defined]
    assert not task.checks.info_messages()


def test_a_broken_tokenizer_is_called_so(tmp_path: Path) -> None:
    at = saved(tmp_path / "model")
    task_on(SFT, at, tmp_path)
    (at / "tokenizer.json").write_text('{"model": 1}')
    task = make_task(RunConfig.model_validate(SFT.tiny(tmp_path) | {"model": {"path": str(at)}}))
    with pytest.raises(RecipeError, match=r"the tokenizer in '.*' cannot be read \(.*\); replace its tokenizer files"):
        task.checks.run()
