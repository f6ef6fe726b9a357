"""What the plan predicts, against tensors that exist: states of real engines, activations that autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers import Workers

STATES = 0.02
ACTIVATIONS = 0.10
LORA = {"model": {"lora": {"rank": 4}}}


PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def check_states(workers: Workers, **arguments: Any) -> None:
    for rank in workers("tests.parity.memory_cases:states", **arguments):
        predicted = sum(size for _, _, size in rank["lines"])
        print(arguments, rank["measured"], predicted, round(predicted / rank["measured"] - 1, 4))
        if abs(predicted / rank["measured"] - 1) > STATES:
            print("XXX", rank["sizes"], rank["lines"])


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_states(
    one: Workers, two: Workers, three: Workers, kind: str, precision: str, accumulate: int, changes: dict[str, Any], size: int
) -> None:
    workers = {1: one, 2: two, 3: three}[size]
    check_states(workers, kind=kind, precision=precision, accumulate=accumulate, changes=changes)


SIZES = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("task", ["sft", "rm", "dpo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("packing", [True, False])
def test_activations(one: Workers, task: str, dtype: str, checkpointing: bool, lora: Any, family: str, packing: bool) -> None:
    config = {"model_type": family, **SIZES, "head_dim": 16}
    options = {"precompute_ref_log_probs": False} if task == "dpo" else {}
    found = one("tests.parity.memory_cases:activations", dtype=dtype, count=3, name=task, changes={"batch": {"packing": packing},
            "model": {"config": config, "gradient_checkpointing": checkpointing, "lora": lora}, "data": {"max_length": 200}})[0]
    print("ACT", task, dtype, checkpointing, lora, family, packing, round(found["predicted"] / found["measured"] - 1, 3), found)
