"""Families that see later tokens are found by a probe."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.models.checks import sees_later_tokens


@pytest.mark.parametrize(
    ("model_type", "sees"),
    [("xlnet", True), ("cpmant", True), ("gpt2", False), ("opt", False), ("bloom", False), ("gpt_neox", False),
     ("falcon", False), ("mamba", False), ("qwen3_next", False), ("openai-gpt", False), ("ctrl", False), ("xglm", False)],
)  # fmt: skip
def test_models_that_see_their_targets_are_found(model_type: str, sees: bool) -> None:
    """formats.md A7: XLNet and CPM-Ant trained on targets that they see, with exit code 0."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    state = torch.get_rng_state()
    assert sees_later_tokens(model) is sees
    assert torch.equal(state, torch.get_rng_state())


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "task", "micro", "max_length", "refused"),
    [
        (LONGROPE, "sft", 2, 65, "longrope positions depend on the longest row of a batch above 64 tokens"),
        (LONGROPE, "sft", 2, 64, ""),
        (LONGROPE, "sft", 1, 65, ""),
        (LONGROPE, "dpo", 1, 65, "lower it to 64"),
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "sft",
            1,
            257,
            "the longest row that was seen above 256",
        ),
        ({"rope_type": "default", "rope_theta": 1e4}, "sft", 8, 1000, ""),
    ],
)
def test_positions_that_depend_on_other_rows_are_refused(
    rope: dict[str, object], task: str, micro: int, max_length: int, refused: str
) -> None:
    """training.md 3: the loss of a step depended on batch.micro, and so on the number of processes."""
    from dstrain.config import RunConfig
    from dstrain.errors import RecipeError
    from dstrain.models.checks import check_length_dependent
    from dstrain.tasks import find_task

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    own = {"original_max_position_embeddings": 64, "pad_token_id": 0} if rope is LONGROPE else {}
    config = AutoConfig.for_model("phi3" if own else "llama", **sizes, **own, rope_parameters=rope)
    recipe = RunConfig.model_validate(
        {"task": task, "data": {"max_length": max_length}, "batch": {"total": 8, "micro": micro}}
    )
    rows = find_task(task).rows_per_sample  # type: ignore[attr-defined]
    if not refused:
        check_length_dependent(config, recipe, rows)
        return
    with pytest.raises(RecipeError, match=refused):
        check_length_dependent(config, recipe, rows)
