"""Memory plans: known sums of the ZeRO paper, what each setting adds, and consistent totals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from dstrain.errors import PresetError
from dstrain.planner.lines import OPTIMIZERS, QUANTIZED_WEIGHTS
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.workload import Cluster
from dstrain.preset import preset_names, read_preset
from tests.reward_models import export_reward_model
from tests.unit.planner.recipes import GIB, made_config, made_plan

LLAMA_8B = 8_030_261_248


def states(plan: MemoryPlan) -> int:
    return sum(line.num_bytes for line in plan.lines if line.kind == "state" and line.place == "gpu")


@pytest.mark.parametrize(
    ("preset", "per_param"), [("zero0", 16), ("zero1", 4 + 12 / 64), ("zero2", 2 + 14 / 64), ("zero3", 16 / 64)]
)
def test_states_are_those_of_figure_1_of_the_zero_paper(preset: str, per_param: float) -> None:
    config = made_config(batch={"total": 64, "micro": 1})
    if preset == "zero1":  # DeepSpeed frees what it has reduced, also at stage 1, where one pass is the whole step
        per_param = 2 + 14 / 64
    assert states(made_plan(preset, config, nodes=8)) == pytest.approx(per_param * LLAMA_8B, rel=1e-3)


def test_summing_several_passes_in_fp32_is_counted() -> None:
    several = made_config(batch={"total": 64, "micro": 1})
    assert states(made_plan("zero2", several)) == pytest.approx((2 + 16 / 8) * LLAMA_8B, rel=1e-3)
    assert states(made_plan("zero1", several)) == pytest.approx((2 + 6 + 12 / 8) * LLAMA_8B, rel=1e-3)


def test_offloaded_states_are_on_the_host_or_the_disk() -> None:
    on_gpu, offloaded, on_disk = (made_plan(name) for name in ("zero3", "zero3_offload", "zero3_nvme"))
    assert offloaded.gpu_bytes < on_gpu.gpu_bytes
    assert offloaded.host_bytes_per_node > 16 * LLAMA_8B > on_gpu.host_bytes_per_node
    assert on_disk.nvme_bytes_per_node > 14 * LLAMA_8B
    assert on_disk.host_bytes_per_node < offloaded.host_bytes_per_node


def test_the_peak_is_that_of_the_worst_moment() -> None:
    plan = made_plan("zero2")
    moments = [
        plan.total("gpu", "always", "pass", "head"),
        plan.total("gpu", "always", "pass", "layer"),
        plan.total("gpu", "always", "step"),
    ]
    assert plan.gpu_bytes == max(moments)


@pytest.mark.parametrize("name", preset_names())
def test_every_line_names_its_formula_and_source(name: str) -> None:
    plan = made_plan(name, made_config("dpo"))
    for line in plan.lines:
        assert line.formula
        assert line.source
        assert line.num_bytes > 0
    assert json.loads(json.dumps(plan.as_json()))["gpu_bytes"] == plan.gpu_bytes


def test_half_the_tokens_take_half_the_activations() -> None:
    whole, half = (made_plan("zero2", made_config(batch={"micro": micro, "total": 64})) for micro in (4, 2))
    for name in ("inputs of the layers", "one recomputed layer"):
        assert whole.find(name).num_bytes == pytest.approx(2 * half.find(name).num_bytes)  # type: ignore[union-attr]


def test_tokens_per_micro_bounds_a_pass_and_a_pair_is_two_rows() -> None:
    batch = {"total": 64, "micro": None, "tokens_per_micro": 6000}
    assert made_plan("zero2", made_config(batch=batch)).workload.tokens == 6000
    assert made_plan("zero2", made_config("dpo", batch={"total": 64, "micro": 2})).workload.tokens == 4 * 1024
    longer = made_config("dpo", batch={**batch, "tokens_per_micro": 100})
    assert made_plan("zero2", longer).workload.tokens == 2 * 1024, "a longer sample is a pass of its own"


@pytest.mark.parametrize(
    ("options", "lora", "preset", "size"),
    [
        ({}, None, "zero2", 2 * LLAMA_8B),
        ({}, None, "zero3", 2 * LLAMA_8B / 8),
        ({"precompute_ref_log_probs": True}, None, "zero2", 0),
        ({"loss_type": "simpo"}, None, "zero2", 0),
        ({}, {"rank": 16}, "zero2", 0),
        ({"ref_model": "Qwen/Qwen2.5-0.5B"}, None, "zero2", 2 * 494_032_768),
    ],
    ids=["in memory", "in shards", "cached", "none", "the LoRA base", "another model"],
)
def test_a_reference_takes_what_its_kind_takes(
    options: dict[str, object], lora: object, preset: str, size: float
) -> None:
    line = made_plan(preset, made_config("dpo", options=options, model={"lora": lora})).find("reference model")
    assert (line.num_bytes if line else 0) == pytest.approx(size, rel=1e-3)


def test_adapters_need_no_states_of_the_base() -> None:
    full, lora = made_plan("zero2"), made_plan("zero2", made_config(model={"lora": {"rank": 16}}))
    trained = lora.shape.count(trainable=True)
    assert trained == 41_943_040, "as peft's print_trainable_parameters says of rank 16 on all linear layers"
    assert states(lora) < 2.1 * LLAMA_8B < states(full)


def test_the_head_never_holds_all_logits() -> None:
    plan = made_plan("zero3", made_config(batch={"total": 64, "micro": 8}))
    held = sum(line.num_bytes for line in plan.lines if line.name in ("errors of the head", "logits of a slice"))
    assert held < 1.5 * GIB < 8 * 1024 * 128_256 * 4


def test_the_head_is_computed_in_the_chunks_of_the_model() -> None:
    from dstrain.models import heads
    from dstrain.planner import lines

    assert lines.CHUNK_BYTES == heads.MAX_CHUNK_BYTES
    own = (lines.KEPT_SHARE, lines.SLICE_SHARE, lines.BLOCK_SHARE)
    assert own == (heads.KEPT_SHARE, heads.SLICE_SHARE, heads.BLOCK_SHARE)


def test_images_are_counted_with_their_encoder() -> None:
    config = made_config("vlm", "llava-1.5-7b", data={"max_length": 2048}, model={"freeze": ["vision"], "lora": None})
    frozen = made_plan("zero2", config)
    trained = made_plan("zero2", made_config("vlm", "llava-1.5-7b", data={"max_length": 2048}))
    assert frozen.find("weights: vision") is None
    assert frozen.find("frozen weights: vision").num_bytes == pytest.approx(2 * 303_507_456, rel=1e-3)  # type: ignore[union-attr]
    assert trained.gpu_bytes > frozen.gpu_bytes


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_each_optimizer_has_its_states(name: str) -> None:
    plan = made_plan("zero2", made_config(optim={"name": name}))
    line = plan.find("optimizer states")
    least = (OPTIMIZERS[name].per_hidden_param or OPTIMIZERS[name].per_param) * LLAMA_8B / 8
    assert least <= (line.num_bytes if line else 0) <= OPTIMIZERS[name].per_param * LLAMA_8B / 8 + 8


def test_quantized_weights_are_those_of_the_layers_only() -> None:
    config = made_config(model={"lora": {"rank": 16}})
    quantized = config.model_copy(update={"model": config.model.model_copy(update={"quantize": "nf4"})})
    plain, small = made_plan("zero2", config), made_plan("zero2", quantized)
    assert small.find("frozen weights: head") == plain.find("frozen weights: head")
    layers = plain.find("frozen weights: layers").num_bytes / 2  # type: ignore[union-attr]
    assert small.find("frozen weights: layers").num_bytes == pytest.approx(layers * QUANTIZED_WEIGHTS["nf4"], rel=0.01)  # type: ignore[union-attr]


def test_a_preset_that_the_recipe_cannot_use_is_refused() -> None:
    config = made_config(precision="fp16")
    with pytest.raises(PresetError, match=r"fp16"):
        plan_memory(config, read_preset("zero0"), Cluster())


def test_a_background_save_copies_the_states() -> None:
    plan = made_plan("zero2", made_config(save={"background": True}))
    assert plan.find("copy for background saves").num_bytes == pytest.approx(12 * LLAMA_8B / 8, rel=1e-3)  # type: ignore[union-attr]


def test_planning_imports_neither_torch_nor_what_reads_data() -> None:
    import subprocess

    program = (
        "import sys; from tests.unit.planner.recipes import made_plan; made_plan('zero3'); "
        "print({'torch', 'transformers', 'deepspeed', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_master_weights_and_states_in_bf16_take_half(tmp_path: Path) -> None:
    block = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    file = tmp_path / "own.json"
    file.write_text(json.dumps({**block, "zero_optimization": {"stage": 2}}))
    config = made_config(batch={"total": 8, "micro": 1})
    plan = plan_memory(config, read_preset(str(file)), Cluster(gpus_per_node=8))
    assert states(plan) == pytest.approx((2 + 8 / 8) * LLAMA_8B, rel=1e-3)


def test_checkpointed_inputs_can_be_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "activation_checkpointing": {"cpu_checkpointing": True}})
    )
    plan = plan_memory(made_config(), read_preset(str(file)), Cluster(gpus_per_node=8))
    line = plan.find("inputs of the layers")
    assert line is not None
    assert line.place == "host"


@pytest.mark.parametrize(
    ("preset", "scoring", "share"), [("zero2", "online", 1), ("zero3", "online", 8), ("zero2", "cached", 0)]
)
def test_reward_models_that_score_in_each_step_are_counted(
    preset: str, scoring: str, share: int, tmp_path: Path
) -> None:
    """Those that score before the training are gone when it begins."""
    folder = export_reward_model(tmp_path)
    safety = {"method": "safedpo", "scoring": scoring, "harmless_rm": str(folder)}
    line = made_plan(preset, made_config("dpo", options={"safety": safety})).find("reward models")
    if not share:
        assert line is None
        return
    with safe_open(folder / "model.safetensors", "pt") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert line is not None
    assert line.num_bytes == pytest.approx(2 * count / share, rel=1e-3, abs=8)
