"""Quantized weights in shards of ZeRO stage 3: the values, the step and the resume are those of whole weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import adapter, merged_by_peft
from tests.cells import SLOW
from tests.model_families import family
from tests.parity.test_step import SAMPLES, SGD
from tests.workers import WorkerError, Workers

pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")

CASES = "tests.parity.quantized_cases:"
QLORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}, "quantize": "nf4"}
ODD = {"model_type": "llama", "vocab_size": 320, "hidden_size": 30, "intermediate_size": 35, "num_hidden_layers": 2,
       "num_attention_heads": 3, "num_key_value_heads": 1}  # fmt: skip
"""Weights of 300 and of 1050 values: no multiples of a block, nor of the bytes of a stored value."""


def of(**changes: Any) -> dict[str, Any]:
    """Return changes of a recipe: trained adapters on a quantized model; `changes`: sections, or keys of model."""
    sections = {key: changes.pop(key) for key in ("seed", "options", "data") if key in changes}
    return {"moved": True, "model": {**QLORA, **changes}, **SGD, **sections}


STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sft", of()),
    "odd sizes": ("sft", of(config=ODD)),
    "biases, tied embeddings": ("sft", of(config=family("qwen2") | {"tie_word_embeddings": True})),
    "experts": ("sft", of(config=family("mixtral"))),
    "no gradient checkpointing": ("sft", of(gradient_checkpointing=False)),
    "a new head": ("rm", of()),
    "dpo, adapters switched off": ("dpo", of()),
    "dpo, a reference remembered": ("dpo", of(options={"precompute_ref_log_probs": True})),
    "kto, adapters switched off": ("kto", of(seed=2)),
    "images": ("vlm", of()),
    "a scoring model in memory": ("dpo, safe", of()),
    "DoRA": ("sft", of(lora={"rank": 4, "dora": True})),
}


QUICK = ("odd sizes", "dpo, adapters switched off")
"""Cases that stand for the others: dpo for rm, kto and experts, odd sizes for llama, biases and images; DoRA:
resume/test_quantized."""


@pytest.mark.parametrize(
    ("case", "preset"),
    [(case, "zero3") if case in QUICK else SLOW(case, "zero3") for case in STEPS]
    # The codes of a partition elsewhere: odd sizes at stage 3 for the second copy of hpz.
    + [SLOW("llama", "zero3_offload"), SLOW("llama", "zero3_hpz")],
)
def test_a_step_with_sharded_codes_is_one_with_whole_codes(two: Workers, case: str, preset: str) -> None:
    task, changes = STEPS[case]
    whole, sharded = (
        two(
            "tests.parity.cases:one_step",
            task=task,
            kind=kind,
            samples=SAMPLES["uneven"],
            accumulate=2,
            changes=changes,
        )[0]
        for kind in ("zero2", preset)
    )
    np.testing.assert_allclose(sharded["sums"], whole["sums"], rtol=1e-6)
    assert sharded["norm"] == pytest.approx(whole["norm"], rel=1e-6)
    trained = [name for name in whole["gradient"] if "lora_" in name]
    off = np.sqrt(sum(((sharded["gradient"][name] - whole["gradient"][name]) ** 2).sum() for name in trained))
    size = np.sqrt(sum((whole["gradient"][name] ** 2).sum() for name in trained))
    assert size > 0
    assert off <= 1e-6 * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "config"), [("fp32", ODD), ("bf16", family("qwen2")), SLOW("fp32", family("llama"))]
)
def test_each_rank_holds_its_part_of_the_same_codes(two: Workers, precision: str, config: dict[str, Any]) -> None:
    changes = {"model": {**QLORA, "config": config}}
    whole, sharded = (
        two(CASES + "quantized_model", task="sft", kind=kind, changes=changes, precision=precision)
        for kind in ("zero2", "zero3")
    )
    assert len(whole[0]["values"]) == 14
    for rank in (*whole, *sharded):
        assert rank["values"] == whole[0]["values"], "the same codes and scales, in each rank"
    for rank in sharded:
        assert rank["bytes"]["left"] == 0
        assert rank["dtypes"] == {{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]}, (
            "also of the adapters"
        )
        # Padding: up to a stored value and one for two equal parts, in each of 14 layers.
        assert 0 <= rank["bytes"]["own"] - rank["bytes"]["whole"] / 2 <= 14 * 4
    assert whole[0]["bytes"]["own"] == whole[0]["bytes"]["whole"]


@pytest.mark.parametrize(
    # Slow: plain files are read in resume/test_quantized; tied embeddings: the step above.
    "case",
    ["an adapter folder", "other precision", "init", SLOW("files"), SLOW("tied")],
)
def test_what_a_folder_holds_is_quantized_as_at_stage_2(case: str, tmp_path: Path, one: Workers, two: Workers) -> None:
    """Rank 0 reads it alone, and the other rank has no values until a layer is sharded."""
    at = adapter(tmp_path, tied=case == "tied", **({"target_modules": ["q_proj"]} if case == "tied" else {}))
    base = at if case in ("an adapter folder", "tied") else at.parent / "base"
    dtype, precision = ("float32", "bf16") if case == "other precision" else ("float32", "fp32")
    more = {"dtype": dtype, "precision": precision, "path": str(base)}
    if case == "init":
        merged_by_peft(at).save_pretrained(str(tmp_path / "init"))
        more["init"] = str(tmp_path / "init")
    (wanted,) = one(CASES + "loaded", kind="zero2", **more)
    for found in two(CASES + "loaded", kind="zero3", **more):
        assert found["codes"] == wanted["codes"]
        assert found["tied"] == wanted["tied"] == (case == "tied")
        assert found["others"].keys() == wanted["others"].keys()
        for name, value in found["others"].items():
            assert np.array_equal(value, wanted["others"][name]), name


@pytest.mark.slow
def test_no_process_holds_the_model_while_it_loads(tmp_path: Path, one: Workers) -> None:
    """Anonymous memory: pages of mapped files are left out, as the kernel drops them where somebody needs the memory.

    In processes of its own: in one that has called malloc_trim, blocks are taken from the heap's pages that were
    given back, which then count as new ones.
    """
    big = family("llama") | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    one(CASES + "save_folder", folder=str(tmp_path / "tiny"), config=family("llama"))
    (size,) = one(CASES + "save_folder", folder=str(tmp_path / "big"), config=big, max_shard_size="8MB")
    assert len([*(tmp_path / "big").glob("*.safetensors")]) > 4
    with closing(Workers(2)) as new:
        sharded = new(CASES + "load_peak", kind="zero3", first=str(tmp_path / "tiny"), path=str(tmp_path / "big"))
    print("peaks of a load:", [peak / size for peak in sharded], "of", size)
    assert max(sharded) < 0.5 * size


def test_an_adapter_that_unties_the_base_is_refused_and_does_not_hang(tmp_path: Path, two: Workers) -> None:
    at = adapter(tmp_path, tied=True, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(WorkerError, match=r"model\.path: its files hold other parameters than"):
        two(CASES + "loaded", kind="zero3", path=str(at), dtype="float32", precision="fp32")


@pytest.mark.slow
def test_gathered_codes_are_freed_between_the_forward_and_the_backward_pass(two: Workers) -> None:
    """bitsandbytes' own product keeps a view of them, so that all layers would be whole at the end of a forward pass."""
    changes = {"model": {**QLORA, "gradient_checkpointing": False}}
    for rank in two(CASES + "kept_for_the_backward_pass", task="sft", changes=changes):
        assert rank == {"read": 14, "alive": 0}
