"""Situations of public reports on adapters that leave a run; docs/measurements/public-cases.md lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.commands.export import export_model
from dstrain.config.schema import RunConfig
from dstrain.errors import RecipeError
from dstrain.tasks import make_task
from tests.contract.export_cases import make_run
from tests.contract.public_cases import CHATML, END, TINY, byte_tokenizer, read_marked

pytestmark = pytest.mark.usefixtures("fresh_cache")

IDS = torch.tensor([read_marked("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>")[0]])
SIZES = {**TINY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def save_base(folder: Path, tokenizer: Any, **config: Any) -> Path:
    """Write a base whose layers differ visibly from their start; `config` replaces sizes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def read_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of an exported folder, read by transformers or peft alone."""
    auto: Any = AutoPeftModelForCausalLM if (folder / "adapter_config.json").exists() else AutoModelForCausalLM
    with torch.no_grad():
        return auto.from_pretrained(str(folder), dtype=torch.float32).eval()(input_ids=ids).logits.double()


def export_both(folder: Path, base: Path, lora: dict[str, Any], **model: Any) -> tuple[Path, Path]:
    """Return the exported adapters of a run on the base, and the merged model."""
    changes = {"data": {"max_length": 200}, "model": {"config": None, "path": str(base), "lora": lora, **model}}
    run = make_run(folder / "run", "sft", changes)
    for merge in (False, True):
        export_model(run, "last", folder / f"merged-{merge}", merge_lora=merge)
    return folder / "merged-False", folder / "merged-True"


MAMBA = {"model_type": "mamba", "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8}
MOE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
NEW_TOKENS = {"model_type": "gemma", "head_dim": 16, "vocab_size": 320}
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "peft#1035: a merged model is the model with its adapters": ({}, {"rank": 8}),
    "transformers#30316: Mamba": (MAMBA, {"rank": 8, "targets": ["x_proj", "in_proj", "embeddings"]}),
    "a mixture of experts": (MOE, {"rank": 8}),
    "unsloth#219: added tokens": (NEW_TOKENS, {"rank": 8, "targets": ["embed_tokens", "q_proj"]}),
    "peft#2972, transformers#45127, LlamaFactory#10832, unsloth#9331: tied embeddings, each with an adapter": (
        {"tie_word_embeddings": True}, {"rank": 8, "targets": ["embed_tokens", "lm_head", "q_proj"]},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_and_the_merged_model_answer_alike(name: str, tmp_path: Path) -> None:
    config, lora = ADAPTERS[name]
    tokenizer = byte_tokenizer(CHATML, **END)
    if config is NEW_TOKENS:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<new1>", "<new2>"]})
    base = save_base(tmp_path / "base", tokenizer, **config)
    ids = torch.cat([IDS, torch.tensor([[272, 273]])], -1) if config is NEW_TOKENS else IDS
    adapters, merged = (read_logits(folder, ids) for folder in export_both(tmp_path, base, lora))
    assert float((adapters - merged).abs().max()) < 2e-5
    assert float((adapters - read_logits(base, ids)).abs().max()) > 0.5


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    """peft#1300, #1457 and #2898: rows that were added for new tokens were in no adapter."""
    tokenizer = byte_tokenizer(CHATML, **END)
    tokenizer.add_tokens(["<new1>", "<new2>"])
    base = save_base(tmp_path / "base", tokenizer)
    recipe = {
        "task": "sft",
        "model": {"path": str(base), "lora": {"rank": 8}},
        "data": {"train": "x.jsonl"},
        "steps": 1,
    }
    with pytest.raises(RecipeError, match=r"the tokenizer has 274 entries, the model's vocabulary 272"):
        make_task(RunConfig.model_validate(recipe)).checks.run()


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    """LlamaFactory#10560: the head was a tensor of its own beside the embeddings that it is."""
    base = save_base(tmp_path / "base", byte_tokenizer(CHATML, **END), tie_word_embeddings=True)
    run = make_run(tmp_path / "run", "sft", {"data": {"max_length": 200}, "model": {"config": None, "path": str(base)}})
    export_model(run, "last", tmp_path / "out")
    names = [{*safe_open(str(folder / "model.safetensors"), "pt").keys()} for folder in (base, tmp_path / "out")]
    assert names[0] == names[1]
    assert "lm_head.weight" not in names[0]


def test_the_lines_of_the_card_put_adapters_on_the_base_that_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """unsloth-zoo#810, mlx-tune#15 and peft#2321: adapters of a base in 4 bits on the base in 16 bits are another model."""
    pytest.importorskip("bitsandbytes")
    base = save_base(tmp_path / "base", byte_tokenizer(CHATML, **END))
    adapters, merged = export_both(tmp_path, base, {"rank": 8}, quantize="nf4")
    code = re.findall(r"```python\n(.*?)```", (adapters / "README.md").read_text(), re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)  # the card names the base by the last part of its path
    values: dict[str, Any] = {}
    exec(code.replace("'FOLDER'", repr(str(adapters))), values)
    with torch.no_grad():
        logits = values["model"].eval()(input_ids=IDS).logits.double()
    wanted = read_logits(merged, IDS)
    assert float((logits - wanted).abs().max()) < 0.4, "on a CPU, bitsandbytes multiplies in bf16"
    assert float((read_logits(adapters, IDS) - wanted).abs().max()) > 1.0
