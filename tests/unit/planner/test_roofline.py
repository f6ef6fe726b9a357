"""Operations and bytes of a pass are those of its modules, and the bound is that of the slower resource."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from dstrain.config.schema import RunConfig
from dstrain.planner import roofline
from dstrain.planner.gpu_peaks import PEAKS
from dstrain.planner.lines import PlanInputs
from dstrain.planner.roofline import bound_speed, compute_cost, compute_roofline, describe_roofline
from dstrain.planner.shapes import generic_shape, named_config, read_shape, shape_from_config
from dstrain.planner.workload import Workload
from dstrain.report.flops import StepFlops
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from tests.tiny import tiny_recipe
from tests.unit.planner.recipes import made_config, made_plan


def inputs_of(shape: str = "llama-3.2-1b", task: str = "sft", length: int = 2048, **model: Any) -> PlanInputs:
    config = made_config(task, shape, model=model, data={"max_length": length}, batch={"total": 8, "micro": 1})
    return made_plan("zero2", config).run


def cost_of(run: PlanInputs) -> roofline.PassCost:
    cost = compute_cost(run)
    assert cost is not None
    return cost


@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("task", ["sft", "dpo", "rm", "vlm"])
def test_operations_are_those_that_torch_counts(task: str, lora: dict[str, Any] | None, tmp_path: Path) -> None:
    recipe = tiny_recipe(task, tmp_path)
    recipe["model"] |= {"lora": lora, "gradient_checkpointing": False}
    config = RunConfig.model_validate(recipe)
    made: Any = make_task(config)
    module, batch = build_train_module(made), made.collate([made.examples("train")[0]])
    with StepFlops(module, module.model) as counted:
        module(batch)[0].backward()
    shape, tokens = read_shape(config), batch.tensors["input_ids"].numel()
    pairs = [group.prefix**2 + sum(size * (group.prefix + size) for size in group.branches) for group in batch.groups]
    workload = Workload(
        rows=1, tokens=tokens, targets=int(batch.tensors["loss_mask"].sum()) if task != "rm" else tokens, device="cpu",
        images=int(task == "vlm"), is_scored=task == "rm", checkpointed=0.0, keys=sum(pairs) / tokens,
    )  # fmt: skip
    cost = cost_of(PlanInputs(shape=shape, workload=workload, precision="fp32"))
    assert cost.flops == pytest.approx(counted.total, rel=1e-3)


def test_full_training_takes_6_operations_per_weight_and_adapters_about_4() -> None:
    full, adapted = inputs_of(), inputs_of(lora={"rank": 8})
    weights = full.shape.count()  # the embedding is the head
    attention = 12 * full.shape.layers * full.shape.heads * full.shape.head_dim * (2048 + 1) / 2
    assert cost_of(full).flops_per_token == pytest.approx(6 * weights + attention, rel=0.001)
    assert cost_of(adapted).flops_per_token == pytest.approx(4 * weights + attention, rel=0.03)


def test_recomputation_is_counted_apart() -> None:
    recomputed, kept = cost_of(inputs_of()), cost_of(inputs_of(gradient_checkpointing=False))
    layers = inputs_of().shape.count("layers")
    assert recomputed.flops == kept.flops
    assert recomputed.recomputed_flops - kept.recomputed_flops == pytest.approx(2 * layers * 2048, rel=0.1)
    assert recomputed.moved_bytes > kept.moved_bytes


def test_a_reference_adds_its_forward_pass_and_a_quantized_weight_its_dequantization() -> None:
    with_reference, alone = inputs_of("qwen2.5-0.5b", "dpo"), inputs_of("qwen2.5-0.5b", "dpo")
    task = replace(alone.shape.task, reference="cached")
    alone = replace(alone, shape=replace(alone.shape, task=task))
    assert cost_of(with_reference).flops == pytest.approx(4 / 3 * cost_of(alone).flops, rel=0.001)
    adapted, quantized = inputs_of(lora={"rank": 8}), inputs_of(lora={"rank": 8}, quantize="nf4")
    linear = sum(one.numel for one in adapted.shape.tensors if one.is_linear_weight)
    more = cost_of(quantized).moved_bytes - cost_of(adapted).moved_bytes
    assert more == pytest.approx(3 * 2.5 * linear, rel=0.02), "codes are read and values written, three times"
    assert cost_of(quantized).flops == cost_of(adapted).flops


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of the inputs and outputs of operations that are no views. One row of a broadcast counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::detach", "aten::_unsafe_view", "aten::alias"):
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
            self.total += sum(min(one.numel() * one.element_size(), one.untyped_storage().nbytes()) for one in tensors)
        return result


def count_moved(function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a forward and of a backward pass."""
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    with MovedBytes() as forward:
        result = function(*inputs)
    outputs = [*result] if isinstance(result, tuple) else [result]
    gradients = [torch.randn_like(output) for output in outputs]
    with MovedBytes() as backward:
        torch.autograd.backward(outputs, gradients)
    return forward.total, backward.total


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(("norm_class", "model_type"), [(LlamaRMSNorm, "llama"), (GemmaRMSNorm, "gemma")])
def test_bytes_of_a_norm_are_those_of_its_operations(
    norm_class: Any, model_type: str, is_trained: bool, precision: str
) -> None:
    rows, width, dtype = 256, 64, torch.float32 if precision == "fp32" else torch.bfloat16
    norm = norm_class(width).to(dtype)
    norm.weight.requires_grad_(is_trained)
    counted = count_moved(norm, [(rows, width)], dtype)
    run = inputs_of()
    run = replace(run, precision=precision, shape=replace(run.shape, model_type=model_type))
    planned = [size * rows * width for size in roofline._norm_bytes(run, is_trained)]
    assert planned == pytest.approx(counted, rel=0.08), "a few numbers of each row are not counted"


def test_bytes_of_rotations_and_mlps_are_those_of_their_operations() -> None:
    rows, width = 64, 32
    angles = torch.randn(1, rows, width).bfloat16()
    rotated = count_moved(
        lambda query, key: apply_rotary_pos_emb(query, key, angles, angles), [(1, 8, rows, width), (1, 8, rows, width)],
        torch.bfloat16,
    )  # fmt: skip
    values = 2 * 8 * rows * width
    assert [10 * 2 * values, 14 * 2 * values] == pytest.approx(rotated, rel=0.05)
    gated = count_moved(lambda gate, up: torch.nn.functional.silu(gate) * up, [(rows, width)] * 2, torch.bfloat16)
    assert gated == (5 * 2 * rows * width, 9 * 2 * rows * width)


def test_fused_kernels_move_fewer_bytes_for_the_same_operations() -> None:
    for name in ("llama-3.2-1b", "qwen3-0.6b"):
        run = inputs_of(name)
        eager, fused = cost_of(run), cost_of(replace(run, has_fused_kernels=True))
        assert fused.flops == eager.flops
        assert 0.3 * eager.moved_bytes < fused.moved_bytes < 0.8 * eager.moved_bytes
        assert fused.intensity > eager.intensity


def test_a_small_pass_is_bound_by_memory_a_large_one_by_products_and_many_launches_by_the_host() -> None:
    run = replace(inputs_of(), has_fused_kernels=True)
    small = cost_of(replace(run, workload=replace(run.workload, tokens=16, targets=16)))
    large = cost_of(run)
    peaks = PEAKS["H100"]
    assert bound_speed(small, peaks).by == "memory"
    assert bound_speed(small, peaks).tokens_per_second == pytest.approx(16 * 3350e9 / small.moved_bytes)
    speed, by = bound_speed(large, peaks)
    assert by == "products"
    assert speed == pytest.approx(2048 * 989e12 / (large.flops + large.recomputed_flops))
    assert bound_speed(large, peaks, launches=100_000) == (2048 / 0.5, "launches")


def test_the_bound_is_that_of_the_kernels_of_the_run() -> None:
    run = inputs_of()
    values = compute_roofline(run, ("H100", "NVIDIA GeForce RTX 4090", "Quadro 1"))
    assert values is not None
    assert values["kernels"] == "none"
    assert values["bytes_per_token"]["liger"] < values["bytes_per_token"]["none"]
    assert [*values["bounds"]] == ["H100", "NVIDIA GeForce RTX 4090"]
    shown = describe_roofline(values)
    assert shown.count("\n") == 1
    assert "computed" in shown
    assert "H100" in shown
    assert "bound by" in shown


def test_peaks_are_not_for_fp32_and_unknown_layers_are_not_counted() -> None:
    run = inputs_of()
    assert compute_roofline(replace(run, precision="fp32"), ("H100",))["bounds"] == {}  # type: ignore[index]
    assert "unknown: peaks are published for 16 bits" in describe_roofline(
        compute_roofline(replace(run, precision="fp32"), ("H100",))
    )
    assert "the peaks of Quadro 1 are not known" in describe_roofline(compute_roofline(run, ("Quadro 1",)), "Quadro 1")
    config = named_config("llama-3.2-1b")
    known = shape_from_config(config)
    assert known is not None
    other = replace(generic_shape(config), tensors=known.tensors, param_source="meta device")
    assert compute_roofline(replace(run, shape=other), ("H100",)) is None
    assert "not computed" in describe_roofline(None)
