"""What the plan predicts, against tensors that exist: states of real engines, activations that autograd keeps."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest

from tests.cells import SLOW
from tests.workers import Workers

STATES = 0.02
"""Worst relative error of the states of a rank."""
ACTIVATIONS = 0.10
"""Worst relative error of the activations of a forward pass."""
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
LORA: dict[str, Any] = {"model": {"lora": {"rank": 4}}}
FAST = {
    ("zero1", "bf16", 2, "full", 2), ("zero2_offload", "bf16", 2, "full", 2),
}  # fmt: skip
"""Cases of `make test`: each place once; stage 3 by qlora below."""


def cases() -> list[Any]:
    every = product(PRESETS, ("fp32", "bf16"), (1, 2), ("full", "lora"), (1, 2, 3))
    return [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in every]


TRAINED = {"full": {}, "lora": LORA, "qlora": {"model": {"lora": {"rank": 4}, "quantize": "nf4"}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision", "accumulate", "trained", "size"),
    [*cases(), SLOW("zero2", "fp32", 1, "qlora", 2), ("zero3", "bf16", 1, "qlora", 2),
     SLOW("zero3", "fp32", 1, "qlora", 3), SLOW("zero3_offload", "fp32", 1, "qlora", 2)],
)  # fmt: skip
def test_the_states_of_each_rank_are_predicted(
    request: pytest.FixtureRequest, kind: str, precision: str, accumulate: int, trained: str, size: int
) -> None:
    workers: Workers = request.getfixturevalue({1: "one", 2: "two", 3: "three"}[size])
    found = workers(
        "tests.parity.memory_cases:states", kind=kind, precision=precision, accumulate=accumulate,
        changes=TRAINED[trained],
    )  # fmt: skip
    for rank in found:
        predicted = sum(size for _, _, size in rank["lines"])
        error = predicted / rank["measured"] - 1
        print(f"{kind} {precision} x{accumulate} {trained} N={size}: {rank['measured']} bytes, predicted {error:+.2%}")
        assert abs(error) <= STATES, rank
        moments = sum(size for name, _, size in rank["lines"] if name == "optimizer states")
        assert moments == pytest.approx(rank["parts"]["moments"], rel=STATES)
        step = rank["step"]
        print(f"  in the step: {step['measured']} bytes, predicted {step['predicted']}")
        # Norms, scales, counters and copies of vectors are not predicted. Weights gathered again are found where they
        # have a new address.
        low, high = step["predicted"], max(step["predicted"], step["again"])
        slack = 2_000 + rank["measured"] / 1_000
        assert low * (1 - STATES) - slack <= step["whole"], step
        assert step["measured"] <= high * (1 + STATES) + slack, step


OTHER_STATES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lion": ("zero2", "bf16", {"optim": {"name": "lion"}}),
    "adafactor": ("zero0", "bf16", {"optim": {"name": "adafactor"}}),
    "muon": ("zero1", "bf16", {"optim": {"name": "muon", "clip": 0}}),
    "muon in fp32": ("zero2", "fp32", {"optim": {"name": "muon", "clip": 0}}),
    "muon at stage 3": ("zero3", "bf16", {"optim": {"name": "muon", "clip": 0}}),
    "dora": ("zero3", "bf16", {"model": {"lora": {"rank": 4, "dora": True}}}),
    "frozen by a glob": ("zero2", "bf16", {"model": {"freeze": ["model.layers.*.mlp"]}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [SLOW(name) if name in ("muon", "dora") else name for name in OTHER_STATES])
def test_the_states_of_other_runs_are_predicted(one: Workers, name: str) -> None:
    kind, precision, changes = OTHER_STATES[name]
    (found,) = one("tests.parity.memory_cases:states", kind=kind, precision=precision, accumulate=2, changes=changes)
    predicted, step = sum(size for _, _, size in found["lines"]), found["step"]
    print(f"{name}: {found['measured']} bytes, predicted {predicted / found['measured'] - 1:+.2%}; in the step {step}")
    assert predicted == pytest.approx(found["measured"], rel=STATES)
    if name != "muon at stage 3":  # whose largest sub-group is smaller than it could be
        assert step["predicted"] == pytest.approx(step["whole"], rel=STATES, abs=2_000 + found["measured"] / 1_000)


TINY = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
OTHER = {"vocab_size": 640, "hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 5, "num_attention_heads": 5,
         "num_key_value_heads": 1, "head_dim": 24}  # fmt: skip
"""A shape that no formula was written or corrected with."""
SIMPO = {"options": {"loss_type": "simpo"}}
"""DPO without a reference, whose outputs would have to be computed first."""
FAST_PASSES = {
    ("sft", "llama", "bfloat16", False, "full", True), ("rm", "qwen3", "float32", False, "lora", True),
    ("dpo", "llama", "bfloat16", True, "full", True), ("sft", "qwen2", "float32", True, "lora", False),
}  # fmt: skip


def passes() -> list[Any]:
    every = product(
        ("sft", "rm", "dpo"),
        ("llama", "qwen2", "qwen3", "gemma"),
        ("float32", "bfloat16"),
        (False, True),
        ("full", "lora"),
        (True, False),
    )
    return [pytest.param(*case, marks=[] if case in FAST_PASSES else pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("task", "family", "dtype", "checkpointed", "trained", "packed"), passes())
def test_the_activations_of_a_pass_are_predicted(
    one: Workers, task: str, family: str, dtype: str, checkpointed: bool, trained: str, packed: bool
) -> None:
    for sizes in (TINY, OTHER):
        if family == "qwen2":  # its heads divide the width
            sizes = {name: size for name, size in sizes.items() if name != "head_dim"}
        model = {"config": {"model_type": family, **sizes}, "gradient_checkpointing": checkpointed,
                 "lora": {"rank": 8} if trained == "lora" else None}  # fmt: skip
        changes = {
            "model": model,
            "batch": {"packing": packed},
            "data": {"max_length": 200},
            **(SIMPO if task == "dpo" else {}),
        }
        (found,) = one("tests.parity.memory_cases:activations", dtype=dtype, count=3, name=task, changes=changes)
        error = found["predicted"] / found["measured"] - 1
        print(
            f"{task} {family} {dtype} {'checkpointed ' * checkpointed}{trained}{' packed' * packed}: {found['measured']} bytes, predicted {error:+.2%}"
        )
        assert abs(error) <= ACTIVATIONS, found


@pytest.mark.parametrize(
    ("heads", "checkpointed"), [((4, 2), False), SLOW((4, 2), True), SLOW((4, 1), False), SLOW((6, 3), False)]
)
def test_the_activations_of_a_shared_pass_are_predicted(
    two: Workers, heads: tuple[int, int], checkpointed: bool
) -> None:
    """Key-value heads are divided, copied for both processes, or repeated for each query head."""
    sizes = TINY | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 12 * heads[0]}
    changes = {
        "model": {"config": {"model_type": "llama", **sizes}, "gradient_checkpointing": checkpointed},
        "batch": {"packing": True},
        "data": {"max_length": 200},
        "parallel": {"sequence": 2},
    }
    for found in two("tests.parity.memory_cases:activations", dtype="float32", count=3, changes=changes):
        error = found["predicted"] / found["measured"] - 1
        print(f"{heads} {'checkpointed' * checkpointed}: {found['measured']} bytes, predicted {error:+.2%}")
        assert abs(error) <= ACTIVATIONS, found


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
OTHER_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("llama", {"lora": {"rank": 8, "dropout": 0.1}}),
    "dropout of some": ("llama", {"lora": {"rank": 8, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}}),
    "nf4": ("llama", {"lora": {"rank": 8}, "quantize": "nf4"}),
    "int8": ("llama", {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}, "quantize": "int8"}),
    "mixtral": ("mixtral", {}),
    "mixtral lora": ("mixtral", {"lora": {"rank": 8}}),
    "qwen3_moe": ("qwen3_moe", {}),
}
FAST_LAYERS = {("dropout", "bfloat16"), ("int8", "float32")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in FAST_LAYERS else pytest.mark.slow)
        for name, dtype in product(OTHER_LAYERS, ("float32", "bfloat16"))
        # On a CPU bitsandbytes keeps the weights that it has dequantized to bf16.
        if dtype == "float32" or name not in ("nf4", "int8")
    ],
)
def test_the_activations_of_other_layers_are_predicted(one: Workers, name: str, dtype: str) -> None:
    family, model = OTHER_LAYERS[name]
    for sizes in (TINY, OTHER):
        known = {"mixtral": ("num_local_experts", "num_experts_per_tok"),
                 "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}.get(family, ())  # fmt: skip
        config = {"model_type": family, **sizes, **{key: EXPERTS[key] for key in known}}
        changes = {
            "model": {"config": config, "gradient_checkpointing": False, **model},
            "batch": {"packing": False},
            "data": {"max_length": 200},
        }
        (found,) = one("tests.parity.memory_cases:activations", dtype=dtype, count=3, changes=changes)
        error = found["predicted"] / found["measured"] - 1
        print(f"{name} {dtype}: {found['measured']} bytes, predicted {error:+.2%}")
        assert abs(error) <= ACTIVATIONS, found


@pytest.mark.parametrize("trained", ["all", "q_proj", "embedding"])
def test_the_activations_of_stage_3_are_those_of_other_stages(one: Workers, trained: str) -> None:
    """Also where most weights are frozen: DeepSpeed's linear layers would keep their inputs."""
    lora = {"rank": 8, "dropout": 0.1} | ({"targets": ["q_proj"]} if trained == "q_proj" else {})
    frozen = {"freeze": ["*layers*", "lm_head"]} if trained == "embedding" else {"lora": lora}
    model = {"config": {"model_type": "llama", **TINY}, "gradient_checkpointing": False, **frozen}
    changes = {"model": model, "batch": {"packing": False}, "data": {"max_length": 200}}
    found = [
        one("tests.parity.memory_cases:activations", dtype="bfloat16", count=3, changes=changes, is_zero3=is_zero3)[0]
        for is_zero3 in (False, True)
    ]
    assert found[1]["measured"] == pytest.approx(found[0]["measured"], rel=0.001)


LONG = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
SLOPE = 0.05
"""Worst relative error of the bytes per token of a pass's peak."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "tile", "dtype"),
    [
        ([4096, 8192], 256, "float32"),
        # The claim of the first, at the lengths that tiles are for and in the type of a GPU.
        pytest.param([4096, 16384, 65536], 512, "bfloat16", marks=pytest.mark.slow),
        pytest.param([4096, 16384, 65536], False, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_pass_grows_with_its_tokens_as_planned(
    one: Workers, tokens: list[int], tile: Any, dtype: str
) -> None:
    model = {"config": {"model_type": "llama", **LONG}, "tiled_mlp": tile, "lora": {"rank": 8}}
    (found,) = one(
        "tests.parity.memory_cases:pass_peaks", changes={"model": model}, dtype=dtype, length=512, tokens=tokens
    )
    for below, above in pairwise(found):
        slopes = [(above[key] - below[key]) / (above["tokens"] - below["tokens"]) for key in ("measured", "planned")]
        print(f"{tile} {dtype} {below['tokens']} to {above['tokens']}: {slopes[0]:.0f}, planned {slopes[1]:.0f}")
        assert slopes[1] == pytest.approx(slopes[0], rel=SLOPE), found


@pytest.mark.parametrize("tokens", [64, SLOW(2048)])
def test_the_peak_of_a_pass_with_dora_is_predicted(tokens: int, one: Workers) -> None:
    """With few tokens the norms of the adapted weights are most of it, with many the outputs that are kept."""
    sizes = LONG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    model = {"config": {"model_type": "llama", **sizes}, "lora": {"rank": 8, "dora": True}}
    (found,) = one(
        "tests.parity.memory_cases:pass_peaks", changes={"model": model}, dtype="bfloat16", length=64, tokens=[tokens]
    )
    print(f"{tokens} tokens: {found[0]['measured']} bytes, planned {found[0]['planned']}")
    assert found[0]["planned"] == pytest.approx(found[0]["measured"], rel=SLOPE)
