"""Memory of images: activations of the vision encoder and of the projector."""

# Shapes: S patches of all images of a pass, H width of the encoder, I width of its MLP.

from __future__ import annotations

from collections.abc import Iterator

from dstrain.planner.line import MemoryLine
from dstrain.planner.shape import ModelShape
from dstrain.planner.workload import Workload

SOURCE = "transformers models/clip/modeling_clip.py and models/qwen2_5_vl/modeling_qwen2_5_vl.py"


def vision_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the images; each row has one image."""
    vision = shape.vision
    if vision is None or not workload.images:
        return
    patches, tokens = vision.patches * workload.images, vision.tokens * workload.images
    pixels = 4 * patches * 14 * 14 * 3
    yield MemoryLine(
        "pixels and image features", pixels + width * patches * vision.hidden, "gpu", "activation", "4 x 588 S + w S H",
        "patches of 14 x 14 pixels", "pass",
    )  # fmt: skip
    per_patch = width * (6 * vision.hidden + (4 if vision.is_gated else 3) * vision.intermediate) + 4 * vision.heads
    per_patch += (8 + 2 * width) * vision.hidden if vision.is_gated else 2 * width * vision.hidden + 16
    is_trained = any(
        tensor.is_trainable for tensor in shape.tensors if "vis" in tensor.name and tensor.part != "projector"
    )
    if is_trained:
        recomputed = round(vision.layers * workload.checkpointed)
        inputs = width * patches * vision.hidden * recomputed
        yield MemoryLine(
            "inputs of the encoder's layers", inputs, "gpu", "activation", "w S H per layer", SOURCE, "pass"
        )
        kept = round(per_patch * patches * (vision.layers - recomputed))
        yield MemoryLine(
            "activations of the vision encoder", kept, "gpu", "activation", "w S (6 H + 3 I) and norms per layer",
            SOURCE, "pass",
        )  # fmt: skip
    else:
        yield MemoryLine(
            "one layer of the frozen encoder", round(per_patch * patches), "gpu", "activation",
            "w S (6 H + 3 I), nothing is kept", SOURCE, "layer",
        )  # fmt: skip
    projected = width * (patches * vision.hidden + 3 * tokens * shape.hidden)
    yield MemoryLine(
        "activations of the projector", projected, "gpu", "activation", "w (S H + 3 S' H')", SOURCE, "pass"
    )
