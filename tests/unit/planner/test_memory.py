"""Memory plans: known sums of the ZeRO paper, what each setting adds, and consistent totals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from dstrain.errors import PresetError, RecipeError
from dstrain.planner import memory
from dstrain.planner.lines import MOMENTS, OPTIMIZERS, QUANTIZED_WEIGHTS
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.shapes import read_shape
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
    sums = {moment: plan.total("gpu", moment) for moment in MOMENTS}
    assert plan.gpu_bytes == max(sums.values())
    assert sums["head"] != sums["update"]


def test_gradients_of_a_single_pass_do_not_exist_before_its_backward_pass() -> None:
    for preset, first in (("zero0", "embedding"), ("zero2", "reduction"), ("zero3", "encoder")):
        single, several = (
            made_plan(preset, made_config(batch={"total": None, "micro": 1, "accumulate": n})) for n in (1, 2)
        )
        assert single.find("gradients").first == first  # type: ignore[union-attr]
        assert several.find("gradients").moments == tuple(MOMENTS)  # type: ignore[union-attr]
    lora = made_plan(
        "zero2", made_config(model={"lora": {"rank": 16}}, batch={"total": None, "micro": 1, "accumulate": 1})
    )
    assert lora.find("gradients").first == "embedding", "a bucket holds them all"  # type: ignore[union-attr]


def test_the_gradient_of_a_tied_head_waits_for_that_of_the_embedding() -> None:
    for shape, last in (("qwen2.5-0.5b", "embedding"), ("llama-3.1-8b", "reduction")):
        plan = made_plan("zero2", made_config(shape=shape, batch={"total": None, "micro": 1, "accumulate": 1}))
        assert plan.find("gradient of the head").last == last  # type: ignore[union-attr]


def test_workspaces_of_cublas_are_tensors_of_the_allocator() -> None:
    line = made_plan("zero2").find("workspaces of cuBLAS")
    assert line is not None
    assert (line.kind, line.num_bytes) == ("buffer", 2 * 32 * 2**20)
    config, preset = made_config(precision="fp16"), read_preset("zero2")
    old = plan_memory(config, preset, Cluster(gpus_per_node=1, bf16=False)).find("workspaces of cuBLAS")
    assert old is not None
    assert old.num_bytes == 2 * 8320 * 2**10
    assert plan_memory(made_config(), preset, Cluster(kind="cpu")).find("workspaces of cuBLAS") is None


def test_the_vision_tower_is_not_quantized() -> None:
    lora = {"rank": 16}
    frozen, quantized = (
        made_plan("zero2", made_config("vlm", "llava-1.5-7b", model={"lora": lora, "quantize": kind}))
        for kind in (None, "nf4")
    )
    for part in ("vision", "projector"):
        assert frozen.find(f"frozen weights: {part}") == quantized.find(f"frozen weights: {part}")


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
    # Muon's momentum of the hidden matrices has the type of the gradients.
    least = (2 if OPTIMIZERS[name].has_momentum else OPTIMIZERS[name].per_param) * LLAMA_8B / 8
    assert least <= (line.num_bytes if line else 0) <= OPTIMIZERS[name].per_param * LLAMA_8B / 8 + 8


def test_quantized_weights_are_those_of_the_layers_only() -> None:
    config = made_config(model={"lora": {"rank": 16}})
    quantized = config.model_copy(update={"model": config.model.model_copy(update={"quantize": "nf4"})})
    plain, small = made_plan("zero2", config), made_plan("zero2", quantized)
    assert small.find("frozen weights: head") == plain.find("frozen weights: head")
    layers = plain.find("frozen weights: layers").num_bytes / 2  # type: ignore[union-attr]
    assert small.find("frozen weights: layers").num_bytes == pytest.approx(layers * QUANTIZED_WEIGHTS["nf4"], rel=0.01)  # type: ignore[union-attr]


def test_stage_3_shards_codes_and_keeps_scales_whole() -> None:
    config = made_config(model={"lora": {"rank": 16}, "quantize": "nf4"})
    whole, parts, offloaded = (made_plan(preset, config) for preset in ("zero2", "zero3", "zero3_offload"))
    name, scales = "frozen weights: layers", "scales of quantized weights"
    values = whole.find(name).num_bytes / QUANTIZED_WEIGHTS["nf4"]  # type: ignore[union-attr]
    assert parts.find(name).num_bytes == pytest.approx(values / 2 / 8, rel=0.01)  # type: ignore[union-attr]
    assert parts.find(scales).num_bytes == pytest.approx(values / 64, rel=0.02)  # type: ignore[union-attr]
    assert offloaded.find(scales).place == "gpu"  # type: ignore[union-attr]
    assert offloaded.find(name).place == "host"  # type: ignore[union-attr]
    assert whole.find(scales) is None


def test_a_quantized_weight_is_dequantized_for_its_product() -> None:
    plain, quantized = (
        made_plan("zero2", made_config(model={"lora": {"rank": 16}, "quantize": kind})) for kind in (None, "nf4")
    )
    assert plain.find("one dequantized weight") is None
    assert quantized.find("one dequantized weight").num_bytes == 2 * 4096 * 14336  # type: ignore[union-attr]


def test_a_preset_that_the_recipe_cannot_use_is_refused() -> None:
    config = made_config(precision="fp16")
    with pytest.raises(PresetError, match=r"fp16"):
        plan_memory(config, read_preset("zero0"), Cluster())


def test_a_background_save_copies_the_states() -> None:
    plan = made_plan("zero2", made_config(save={"background": True}))
    assert plan.find("copy for background saves").num_bytes == pytest.approx(12 * LLAMA_8B / 8, rel=1e-3)  # type: ignore[union-attr]


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


def layer(plan: MemoryPlan) -> int:
    names = ("one recomputed layer", "activations of the layers", "activations of the last layers")
    return sum(line.num_bytes for line in plan.lines if line.name in names)


def test_layers_whose_gradients_fill_the_first_bucket_are_free_at_the_first_reduction() -> None:
    """24 layers of 14.9 M values, a bucket of 50 M: three layers, of which the head is tied to the embedding."""
    config = made_config(shape="qwen2.5-0.5b", model={"gradient_checkpointing": False})
    plan = made_plan("zero2", config, gpus=1)
    last, others = plan.find("activations of the last layers"), plan.find("activations of the layers")
    assert last is not None
    assert others is not None
    assert others.num_bytes == 7 * last.num_bytes
    assert (last.last, others.last) == ("layer", "reduction")
    assert made_plan("zero3", config, gpus=1).find("activations of the last layers") is None


def test_dropout_gives_each_adapter_an_input_of_its_own() -> None:
    def made(dropout: float, task: str = "sft") -> int:
        return layer(made_plan("zero2", made_config(task, model={"lora": {"rank": 16, "dropout": dropout}})))

    hidden, inner, wide, tokens = 4096, 14336, 4096, 2 * 1024
    inputs = 5 * hidden + wide + inner
    # The attention's own output stays, the shared inputs of q, k, v and of gate, up and that of down go.
    assert made(0.1) - made(0.0) == tokens * ((2 + 1) * inputs - 2 * (2 * hidden + inner))
    assert made(0.1, "dpo") == made(0.0, "dpo"), "its disable_dropout is true"


def test_a_product_in_8_bits_keeps_no_input() -> None:
    lora = {"rank": 8, "targets": ["q_proj", "v_proj"]}
    plain, quantized = (
        layer(made_plan("zero2", made_config(model={"lora": lora, "quantize": kind}))) for kind in ("nf4", "int8")
    )
    assert quantized == plain


@pytest.mark.parametrize(("preset", "optimizer", "gpus", "is_refused"), [
    ("zero2", "adamw_8bit", 1, True), ("zero2", "paged_adamw_8bit", 2, True), ("zero2", "adamw_8bit", 4, False),
    ("zero3", "adamw_8bit", 1, False), ("zero2", "adamw", 1, False),
])  # fmt: skip
def test_a_partition_that_an_8_bit_optimizer_cannot_take_is_refused(
    preset: str, optimizer: str, gpus: int, is_refused: bool
) -> None:
    config = made_config(optim={"name": optimizer})
    if not is_refused:
        assert made_plan(preset, config, gpus=gpus).gpu_bytes
        return
    with pytest.raises(RecipeError, match=r"optim\.name: .*adamw_8bit takes 2147483647 values in one partition, and"):
        made_plan(preset, config, gpus=gpus)


@pytest.mark.parametrize(
    ("preset", "gpus", "gib"), [("zero2", 1, 0), ("zero2", 8, 700 / 1024), ("zero3_zeropp", 8, 3 + 1400 / 1024)]
)
def test_communicators_take_memory_of_nccl(preset: str, gpus: int, gib: float) -> None:
    """zero3_zeropp has a second one within a host, and an all-to-all."""
    line = made_plan(preset, gpus=gpus, nodes=2 if gpus > 1 else 1).find("NCCL")
    assert (line.num_bytes if line else 0) == pytest.approx(gib * GIB)


@pytest.mark.parametrize(
    ("value", "percent"),
    [(None, 4), ("expandable_segments:True,max_split_size_mb:64", 4), ("", 15), ("max_split_size_mb:64", 15)],
)
def test_an_allocator_without_expandable_segments_reserves_more(
    value: str | None, percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    plan = made_plan("zero2")
    line = plan.find("fragmentation")
    assert line is not None
    assert line.num_bytes == pytest.approx(percent / 100 * plan.tensor_bytes, rel=1e-6)
    assert line.formula == f"{percent} % of all tensors"
    assert ("without expandable_segments" in line.source) == (percent == 15)


def test_a_process_on_a_cpu_takes_what_it_touches() -> None:
    tiny = {"model_type": "llama", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = made_config(model={"config": tiny}, precision="fp32", batch={"total": 8, "micro": 4})
    plan = plan_memory(config, read_preset("zero2"), Cluster(kind="cpu"))
    assert 0.4 * GIB < plan.gpu_bytes < 0.8 * GIB, "buckets have no pages that nothing was written to"


def test_a_plan_of_very_many_processes_ends() -> None:
    plan = made_plan("zero2", gpus=1024, nodes=100_000)
    assert plan.cluster.world_size == 102_400_000
    assert plan.gpu_bytes > 2 * LLAMA_8B


MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip


def test_half_of_a_partial_offload_stays_on_the_gpu() -> None:
    half, whole, none = (
        made_plan(preset, made_config("sft", "llama-3.1-8b"))
        for preset in ("zero3_partial_offload", "zero3_offload", "zero3")
    )

    def states(plan: MemoryPlan) -> dict[str, int]:
        lines = [line for line in plan.lines if line.name in ("master weights", "optimizer states")]
        return {place: sum(line.num_bytes for line in lines if line.place == place) for place in ("gpu", "host")}

    assert states(none)["gpu"] == states(whole)["host"] == sum(states(half).values())
    # 1.004 billion values of a process are 11 sub-groups of 100 million: 5 stay, with 12 bytes a value.
    assert states(half)["gpu"] == 5 * 100_000_000 * 12


def test_the_experts_of_a_layer_are_gathered_at_once_and_a_token_passes_several() -> None:
    config = made_config(model={"config": MIXTRAL}, data={"train": "nowhere.jsonl"}, batch={"total": 8, "micro": 1})
    plan = made_plan("zero3", config)
    experts = 3 * 8 * 4096 * 14336
    preset = read_preset("zero3").block["zero_optimization"]
    assert plan.find("gathered weights").num_bytes == 2 * (experts + preset["stage3_prefetch_bucket_size"])  # type: ignore[union-attr]
    # Up and gate with activation and product of two experts, their outputs, and two copies of each token.
    dense = made_plan(
        "zero3", made_config(model={"config": {**MIXTRAL, "model_type": "mistral"}}, batch={"total": 8, "micro": 1})
    )
    assert layer(plan) - layer(dense) == 1024 * 2 * (4 * 14336 + 4 * 4096)


@pytest.mark.parametrize(
    ("options", "tokens"), [({"max_pages": 1}, 2508), ({"max_pages": 4}, 8192), ({"max_pages": 1, "dpi": 72}, 627)]
)
def test_pages_of_documents_are_counted(options: dict[str, int], tokens: int) -> None:
    """A letter page at 144 dpi has 1224 x 1584 pixels, 28 x 28 of them are a token; no more than a row can have."""
    config = made_config("docqa", "qwen2.5-vl-7b", options=options, data={"max_length": 8192}, batch={"total": 8, "micro": 1},
                         model={"freeze": ["vision"]})  # fmt: skip
    pixels = made_plan("zero2", config).find("pixels")
    assert pixels is not None
    assert pixels.num_bytes == pytest.approx(4 * 1176 * 4 * tokens, rel=0.02)


def test_dora_with_dropout_keeps_the_dequantized_weights_of_a_layer() -> None:
    def added_by_dropout(quantize: str | None) -> int:
        sizes = []
        for dropout in (0.0, 0.1):
            lora = {"rank": 16, "dora": True, "dropout": dropout}
            plan = made_plan("zero2", made_config(model={"lora": lora, "quantize": quantize}))
            sizes.append(sum(line.num_bytes for line in plan.lines if line.name == "one recomputed layer"))
        return sizes[1] - sizes[0]

    # q, k, v, o, gate, up and down of Llama 3.1 8B in 16 bits
    weights = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert added_by_dropout("nf4") - added_by_dropout(None) == pytest.approx(weights, abs=2048)


def test_fused_kernels_keep_less_and_the_plan_says_both() -> None:
    """Of a layer they keep the inputs of norms, gate and up instead of fp32 copies, gate, activation and up."""
    parts = {"gradient_checkpointing": False}
    eager, fused = (
        made_plan("zero2", made_config(model={**parts, "kernels": kernels})) for kernels in ("none", "liger")
    )
    shape, tokens = eager.shape, eager.workload.tokens
    less = shape.layers * (2 * 4 * shape.hidden + 2 * shape.intermediate)
    less += 4 * shape.hidden  # the last norm
    assert eager.saved_bytes == fused.saved_bytes
    assert eager.saved_bytes["none"] - eager.saved_bytes["liger"] == less * tokens
    assert eager.gpu_bytes > fused.gpu_bytes
    assert "liger_kernel" in str(fused.find("activations of the layers"))
    assert "liger_kernel" not in str(eager.find("activations of the layers"))


def test_what_one_recomputed_layer_keeps_with_fused_kernels_is_counted_without_its_input() -> None:
    plan = made_plan("zero2", made_config(model={"kernels": "liger"}))
    shape, workload = plan.shape, plan.workload
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    values = 3 * shape.hidden + 2 * wide + 2 * narrow + 3 * shape.intermediate  # one of four: the layer's input
    line = plan.find("one recomputed layer")
    assert line is not None
    assert line.num_bytes == workload.tokens * (2 * values + 4 * shape.heads + 2 * 4)


@pytest.mark.parametrize(
    ("kernels", "packages", "fused"),
    [
        ("auto", {"liger_kernel", "triton"}, True),
        ("auto", {"triton"}, False),
        ("none", {"liger_kernel", "triton"}, False),
        ("liger", set(), True),
    ],
)
def test_auto_takes_fused_kernels_where_they_are_installed(
    kernels: str, packages: set[str], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(memory, "list_missing_for_triton", lambda environment: [])
    config = made_config(model={"kernels": kernels})
    assert made_plan("zero2", config).run.has_fused_kernels is fused
    shape = read_shape(config)
    assert not memory.has_fused_kernels(config, shape, "cpu")
    assert not memory.has_fused_kernels(config, replace(shape, param_source="meta device"), "cuda")
