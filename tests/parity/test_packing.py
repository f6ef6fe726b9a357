"""One step is one step whether its batches are padded or packed, at every stage, in one process and in two."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cells import SLOW
from tests.parity.test_step import SGD, distance
from tests.reward_models import export_reward_model
from tests.workers import Workers

SAMPLES = [5, 0, 9, 13, 2, 14, 7]
LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}
HYBRID = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""Sizes of models with recurrent layers and attention."""
DELTA_NET = {
    **HYBRID, "model_type": "qwen3_5_text", "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA2 = {
    **HYBRID, "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 16, "attn_layer_indices": [1],
}  # fmt: skip
CONVOLUTION = {**HYBRID, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rm": ("rm", {"moved": True}),
    "rm, adapters": ("rm", {"moved": True, **LORA}),
    "dpo": ("dpo", {"moved": True}),
    "dpo, adapters": ("dpo", {"moved": True, **LORA}),
    "dpo, a reference remembered": ("dpo", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    "orpo": ("dpo", {"options": {"loss_type": "orpo"}}),
    "dpo, safe": ("dpo, safe", {"moved": True}),
    "dpo, delta nets": ("dpo", {"moved": True, "model": {"config": DELTA_NET, "gradient_checkpointing": True}}),
    "dpo, mamba 2": ("dpo", {"moved": True, "model": {"config": MAMBA2, "gradient_checkpointing": True}}),
    "dpo, adapters, convolutions": ("dpo", {"moved": True, "model": {"config": CONVOLUTION, **LORA["model"]}}),
    "rm, delta nets": ("rm", {"moved": True, "model": {"config": DELTA_NET}}),
    "sft, delta nets": ("sft", {"model": {"config": DELTA_NET}}),
    "sft": ("sft", {}),
    "kto": ("kto", {"moved": True, "seed": 6}),
    **{f"{task}, with images": (f"{task}, with images", {"moved": True}) for task in ("vlm", "rm", "dpo")},
    "distill, a teacher in memory": ("distill", {"moved": True}),
    "distill, a teacher remembered": ("distill", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    "kto, a reference remembered": ("kto", {"moved": True, "seed": 6, "options": {"precompute_ref_log_probs": True}}),
}
QUICK = (("rm", 3), ("dpo, delta nets", 3), ("dpo, delta nets", 1), ("dpo, mamba 2", 2), ("rm, adapters", 2), ("dpo", 2), ("dpo, adapters", 3), ("sft", 0), ("kto", 1), ("dpo, safe", 1),
         ("distill, a teacher remembered", 3), ("distill, a teacher in memory", 0),
         *((f"{task}, with images", 3) for task in ("vlm", "rm", "dpo")))  # fmt: skip
"""Cases and stages that stand for the others."""
BY_TWO = (
    (1, "dpo, adapters", 3), (1, "rm, with images", 3), (1, "dpo, with images", 3),
    (2, "rm, with images", 3), (1, "kto", 1), (2, "sft", 0), (1, "rm", 3), (1, "rm, adapters", 2), (1, "dpo", 2),
    (1, "distill, a teacher remembered", 3), (2, "distill, a teacher in memory", 0),
    (1, "dpo, delta nets", 3), (1, "dpo, delta nets", 1), (1, "dpo, mamba 2", 2),
    (1, "vlm, with images", 3), (2, "dpo, adapters", 3), (2, "dpo, with images", 3),
)  # fmt: skip
"""Cells that others stand for: two processes for one; with images vlm, with adapters rm, without shards dpo, safe."""
PADDED = {"batch": {"packing": False}}
PACKED = {"batch": {"packing": True}}


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert distance(found, wanted, "before") == 0, "the weights to begin with"
    assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-6, abs=1e-5)
    assert distance(found, wanted) <= 1e-6


@pytest.mark.parametrize(
    ("processes", "case", "stage"),
    [one if one[1:] in QUICK and one not in BY_TWO else SLOW(*one) for one in product((1, 2), CASES, range(4))],
)
def test_a_packed_step_is_the_padded_one(
    processes: int, case: str, stage: int, definition: Any, request: pytest.FixtureRequest
) -> None:
    workers = request.getfixturevalue({1: "one", 2: "two"}[processes])
    task, changes = CASES[case]
    for found in workers(
        "tests.parity.cases:one_step", task=task, kind=f"zero{stage}", samples=SAMPLES, accumulate=2,
        changes=changes | SGD | PACKED,
    ):  # fmt: skip
        check_equal(found, definition(case))


@pytest.mark.parametrize("scoring", ["online", SLOW("cached")])  # kept: unit/tasks/test_packing
def test_reward_models_score_packed_pairs_in_shards(scoring: str, one: Workers, two: Workers, tmp_path: Path) -> None:
    rms = {f"{name}_rm": str(export_reward_model(tmp_path, name)) for name in ("helpful", "harmless")}
    safety = {**rms, "scoring": scoring, "method": "safedpo", "scaling_weight": 0.5}
    own = {"moved": True, "options": {"safety": safety}, **SGD}
    arguments: dict[str, Any] = {"function": "tests.parity.cases:one_step", "task": "dpo", "samples": SAMPLES}
    wanted = one(**arguments, kind="torch", accumulate=1, changes=own | PADDED)[0]
    for found in two(**arguments, kind="zero3", accumulate=2, changes=own | PACKED):
        check_equal(found, wanted)
