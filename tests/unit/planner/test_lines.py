"""The memory that autograd keeps of images is that of the plan: CLIP in LLaVA, and the encoder of Qwen2.5-VL."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from dstrain.planner.lines import IMAGE_ROWS, PlanInputs, plan_lines
from dstrain.planner.shapes import ModelShape, shape_from_config, with_frozen
from dstrain.planner.workload import Workload

ERROR = 0.05
"""Worst relative error."""
TEXT = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
CLIPS = {
    "tiny": {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 112},
    "other": {"hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 6, "num_attention_heads": 5, "image_size": 70},
}  # fmt: skip
QWENS = {
    "tiny": {"depth": 3, "hidden_size": 48, "intermediate_size": 112, "num_heads": 4, "fullatt_block_indexes": [1]},
    "other": {"depth": 5, "hidden_size": 96, "intermediate_size": 80, "num_heads": 3, "fullatt_block_indexes": [2]},
}  # fmt: skip
"""`other`: shapes that no formula was written or corrected with."""


class _Saved:
    """A tensor that autograd keeps; it is gone with the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_bytes(model: PreTrainedModel, encode: Callable[[], Any]) -> int:
    """Return the bytes that autograd keeps after `encode`, without the model's weights."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Saved:
        box = _Saved(tensor.detach())  # a saved output with its graph would keep that graph
        saved.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        features = encode()  # while they live, the graph does, without layers whose output is not used
    storages = [box.tensor.untyped_storage() for box in saved]
    del features
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in owned}.values())


def build(values: dict[str, Any], dtype: torch.dtype, checkpointed: bool, frozen: list[str]) -> PreTrainedModel:
    values = dict(values)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).to(dtype)
    if checkpointed:
        enable_gradient_checkpointing(model)
    tower = model.model.vision_tower if hasattr(model.model, "vision_tower") else model.model.visual
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(not frozen or "merger" in name)
    return model.train()


def predicted_bytes(shape: ModelShape, images: int, dtype: torch.dtype, checkpointed: bool) -> int:
    """Return the lines of what autograd keeps: pixels in fp32 are the batch's, which it does not."""
    workload = Workload(rows=1, tokens=1, targets=1, images=images, checkpointed=float(checkpointed))
    run = PlanInputs(shape=shape, workload=workload, precision="bf16" if dtype.itemsize == 2 else "fp32")
    lines = {line.name: line for line in plan_lines(run, IMAGE_ROWS) if "head" in line.moments}
    assert shape.vision is not None
    in_batch = 4 * shape.vision.patch_values * shape.vision.patches * images
    is_trained = not {"activations of the vision encoder", "inputs of the encoder's layers"}.isdisjoint(lines)
    own = 0 if is_trained and dtype.itemsize == 4 else in_batch
    return sum(line.num_bytes for line in lines.values()) - own


@pytest.mark.parametrize("size", CLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("frozen", [[], ["vision"]])
def test_images_of_llava_take_what_is_predicted(
    size: str, dtype: torch.dtype, checkpointed: bool, frozen: list[str]
) -> None:
    tower = {"model_type": "clip_vision_model", "patch_size": 14, **CLIPS[size]}
    values = {"model_type": "llava", "text_config": {"model_type": "llama", **TEXT}, "vision_config": tower}
    shape = shape_from_config(values)
    assert shape is not None
    model = build(values, dtype, checkpointed, frozen)
    side = CLIPS[size]["image_size"]
    pixels = torch.randn(3, 3, side, side)
    kept = kept_bytes(model, lambda: torch.cat(model.get_image_features(pixels).pooler_output))
    predicted = predicted_bytes(with_frozen(shape, frozen), 3, dtype, checkpointed)
    print(f"llava {size} {dtype} {'checkpointed' * checkpointed} {frozen}: {kept} bytes, {predicted / kept - 1:+.1%}")
    assert predicted == pytest.approx(kept, rel=ERROR)


@pytest.mark.parametrize("size", QWENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("frozen", [[], ["vision"]])
def test_images_of_qwen2_5_vl_take_what_is_predicted(
    size: str, dtype: torch.dtype, checkpointed: bool, frozen: list[str]
) -> None:
    tower = {"patch_size": 14, "window_size": 56, "out_hidden_size": 64, **QWENS[size]}
    values = {"model_type": "qwen2_5_vl", "text_config": TEXT, "vision_config": tower}
    shape = shape_from_config(values)
    assert shape is not None
    assert shape.vision is not None
    model = build(values, dtype, checkpointed, frozen)
    grid = torch.tensor([[1, 8, 8], [1, 6, 4]])
    patches = int(grid.prod(1).sum())
    pixels = torch.randn(patches, shape.vision.patch_values)
    kept = kept_bytes(model, lambda: torch.cat(model.get_image_features(pixels, grid).pooler_output))
    own = replace(shape, vision=replace(shape.vision, patches=patches, tokens=patches // 4))
    predicted = predicted_bytes(with_frozen(own, frozen), 1, dtype, checkpointed)
    print(
        f"qwen2.5-vl {size} {dtype} {'checkpointed' * checkpointed} {frozen}: {kept} bytes, {predicted / kept - 1:+.1%}"
    )
    assert predicted == pytest.approx(kept, rel=ERROR)
