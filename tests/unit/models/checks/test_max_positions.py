"""A sequence longer than a model's table of positions is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dstrain.config.schema import RunConfig
from dstrain.errors import RecipeError
from dstrain.models.checks import max_positions, rope_length_warning
from dstrain.tasks import make_task
from dstrain.tasks.rm import RewardModel
from dstrain.tasks.sft import SFT

LIMITS: dict[str, tuple[dict[str, Any], int | None]] = {
    "gpt2": ({"n_positions": 32}, 32),
    "bert": ({"max_position_embeddings": 40}, 40),
    "roberta": ({"max_position_embeddings": 42, "pad_token_id": 1}, 40),
    "mpnet": ({"max_position_embeddings": 42}, 40),
    "opt": ({"max_position_embeddings": 40}, 40),
    "bart": ({"max_position_embeddings": 40}, 40),
    "nystromformer": ({"max_position_embeddings": 40}, 40),
    "deberta-v2": ({"max_position_embeddings": 40}, 40),
    "deberta-v2, relative alone": (
        {"max_position_embeddings": 40, "position_biased_input": False, "relative_attention": True, "pos_att_type": "p2c|c2p"},
        None,
    ),
    "gptj": ({"n_positions": 40, "n_embd": 32, "n_head": 2, "rotary_dim": 4, "n_layer": 1}, 40),
    "xlm": ({"max_position_embeddings": 40}, 40),
    "bloom": ({}, None),
    "llama": ({"max_position_embeddings": 40}, None),
    "t5": ({}, None),
    "llava": ({}, None),  # its tower has 577
    "blip-2": ({}, 2048),  # its OPT has 2050, its tower fewer
}  # fmt: skip


@pytest.mark.parametrize("family", LIMITS)
def test_the_table_tells_how_many_tokens_fit(family: str) -> None:
    values, limit = LIMITS[family]
    config = transformers.AutoConfig.for_model(family.split(",")[0], **values)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    assert max_positions(model, config) == limit


@pytest.mark.parametrize(("length", "fits"), [(32, True), (33, False)])
def test_a_task_refuses_what_would_be_out_of_range(length: int, fits: bool, tmp_path: Path) -> None:
    values = SFT.tiny(tmp_path)
    values["model"]["config"] = {
        "model_type": "gpt2",
        "vocab_size": 320,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
    }
    values["data"]["max_length"] = length
    task = make_task(RunConfig.model_validate(values))
    if fits:
        task.checks.run()
        return
    with pytest.raises(
        RecipeError, match=r"^data\.max_length: is 33, but the model has only 32 learned positions; write 32 or"
    ):
        task.checks.run()


def test_rotary_positions_are_warned_of(tmp_path: Path) -> None:
    values = RewardModel.tiny(tmp_path)
    values["model"]["config"]["max_position_embeddings"] = 40
    task = make_task(RunConfig.model_validate(values))
    task.checks.run()
    [line] = task.checks.warnings()
    assert "data.max_length is 48" in line
    assert "up to 40 tokens" in line
    assert not rope_length_warning(transformers.AutoConfig.for_model("llama", max_position_embeddings=48), 48)
