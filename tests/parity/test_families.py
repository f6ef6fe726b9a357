"""One step is one step for every family: in chunks of logits, on two processes, in shards, with adapters, or by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dstrain.models.tiles import find_token_functions
from tests.cells import SLOW
from tests.model_families import FAMILIES, MORE_FAMILIES, family
from tests.parity.test_step import SAMPLES, SGD, distance
from tests.workers import Workers

ROWS = 7
"""Of logits in a chunk; a step has some hundred."""


TILE = 16
"""Tokens of a tile; a micro-batch has some hundred."""


def of(name: str, **model: Any) -> dict[str, Any]:
    return {"model": {"config": family(name), **model}}


def adapted(name: str, *targets: str) -> dict[str, Any]:
    lora: dict[str, Any] = {"rank": 4, "alpha": 8.0}
    return of(name, lora={**lora, "targets": [*targets]} if targets else lora) | {"moved": True}


def is_tiled(config: dict[str, Any]) -> bool:
    """Return True where `model.tiled_mlp` finds something to run in tiles."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return any(True for _ in find_token_functions(model))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("sft", of(name)) for name in FAMILIES},
    **{f"rm, {name}": ("rm", of(name)) for name in ("qwen3", "gemma2", "phi3", "mixtral")},
    **{f"lora, {name}": ("sft", adapted(name)) for name in ("qwen2", "gemma3_text", "phi3", "granite")},
    "lora on experts, mixtral": ("sft", adapted("mixtral", "gate_up_proj", "down_proj", "q_proj")),
    "lora on experts, olmoe": ("sft", adapted("olmoe", "gate_up_proj", "down_proj", "v_proj")),
    "lora on the head, llama": ("sft", adapted("llama", "lm_head", "q_proj")),
    "lora on tied embeddings, gemma2": ("sft", adapted("gemma2", "embed_tokens", "q_proj")),
    "a frozen head, llama": ("sft", of("llama", freeze=["lm_head"])),
    "dpo, gemma2": ("dpo", of("gemma2") | {"moved": True}),
    "dpo, adapters of cohere2": ("dpo", adapted("cohere2")),
    "orpo, smollm3": ("dpo", of("smollm3") | {"options": {"loss_type": "orpo"}}),
    "kto, granite": ("kto", of("granite") | {"moved": True, "seed": 6}),
    "vlm": ("vlm", {}),
    **{name: ("sft", of(name)) for name in MORE_FAMILIES},
}
QUICK = (
    ("llama", 2),
    ("lora on the head, llama", 3),
    ("dpo, gemma2", 3),
    ("kto, granite", 2),
    ("vlm", 3),
    ("llama, in tiles", 3),
    ("lora, gemma3_text, in tiles", 2),
    ("dpo, adapters of cohere2, in tiles", 3),
)
"""Cases and stages that stand for the others; gemma2: dpo, gemma2; falcon, in tiles: llama, in tiles."""
TILED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{case}, in tiles": (task, changes | {"model": {**changes["model"], "tiled_mlp": TILE}})
    for case, (task, changes) in CASES.items()
    if changes and is_tiled(changes["model"]["config"])
}
CASES |= TILED
TOLERANCES: dict[str, float] = {}
"""Of a gradient, where 1e-6 is too little."""


@pytest.fixture(scope="module")
def definition(one: Workers) -> Any:
    """What plain PyTorch does with all samples and all logits at once."""
    found: dict[str, Any] = {}

    def step(case: str) -> Any:
        if case not in found:
            task, changes = CASES[case]
            found[case] = one(
                "tests.parity.family_cases:step_in_chunks", rows=10**6, task=task, kind="torch",
                samples=SAMPLES["uneven"], accumulate=1, changes=changes | SGD,
            )[0]  # fmt: skip
        return found[case]

    return step


@pytest.mark.parametrize(("case", "stage"), [(c, s) if (c, s) in QUICK else SLOW(c, s) for c in CASES for s in (2, 3)])
def test_a_step_of_every_family_is_that_of_plain_pytorch(case: str, stage: int, two: Workers, definition: Any) -> None:
    task, changes = CASES[case]
    wanted = definition(case.removesuffix(", in tiles"))
    for found in two(
        "tests.parity.family_cases:step_in_chunks", rows=ROWS, task=task, kind=f"zero{stage}",
        samples=SAMPLES["uneven"], accumulate=2, changes=changes | SGD,
    ):  # fmt: skip
        assert found["inseparable"] == 0
        assert distance(found, wanted, "before") == 0, "the weights to begin with"
        assert found["sums"] == pytest.approx(wanted["sums"], rel=2e-6, abs=1e-5)
        assert distance(found, wanted) <= TOLERANCES.get(case, 1e-6)
