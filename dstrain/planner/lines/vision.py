"""Memory of images: pixels, activations of the vision encoder and of the projector."""

# Shapes: S positions of all images of a pass in the encoder, H its width, I width of its MLP, V pixel values of a patch,
# S' image tokens, H' width of the language model.

from __future__ import annotations

from collections.abc import Iterator

from dstrain.planner.line import MemoryLine
from dstrain.planner.shape import ModelShape, VisionShape, part_of
from dstrain.planner.workload import Workload

SOURCE = "transformers models/clip/modeling_clip.py and models/qwen2_5_vl/modeling_qwen2_5_vl.py"


def vision_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the images; each row has one image. `width`: bytes of a value."""
    vision = shape.vision
    if vision is None or not workload.images:
        return
    positions, tokens = vision.patches * workload.images, vision.tokens * workload.images
    names = [tensor.name.replace(".lora_", ".") for tensor in shape.tensors if tensor.is_trainable]
    trained = {part_of(name) for name in names}
    # The encoder casts its pixels, and keeps them for the gradient of its first weights.
    pixels = (4 + (width if "vision" in trained and width < 4 else 0)) * vision.patch_values * positions
    yield MemoryLine("pixels", pixels, "gpu", "activation", "4 V S; trained in 16 bits 6 V S", SOURCE, "pass")
    size = _encoder_layer_bytes(vision, width) * positions
    if "vision" in trained:
        yield from _trained_encoder_lines(vision, workload, width, size)
    else:
        yield MemoryLine(
            "one layer of the frozen encoder",
            size,
            "gpu",
            "activation",
            "w S (8 H + 3 I), nothing is kept",
            SOURCE,
            "layer",
        )
    if trained & {"vision", "projector"}:
        kept = _projector_bytes(shape, vision, width, (positions, tokens))
        if vision.is_gated and "vision" not in trained:
            kept -= (4 * vision.hidden + 4) * positions  # the norm's input, which only the encoder's gradient needs
        formula = "w S' (H + 2 H'); Qwen2.5-VL: S (4 H + 4 w H + 4)"
        yield MemoryLine("activations of the projector", kept, "gpu", "activation", formula, SOURCE, "pass")


def _trained_encoder_lines(vision: VisionShape, workload: Workload, width: int, layer: int) -> Iterator[MemoryLine]:
    positions = vision.patches * workload.images
    recomputed = round(vision.layers * workload.checkpointed)
    inputs = width * positions * vision.hidden * recomputed
    yield MemoryLine("inputs of the encoder's layers", inputs, "gpu", "activation", "w S H per layer", SOURCE, "pass")
    # CLIP normalizes its embedded patches before the first layer.
    before = 0 if vision.is_gated else (width * vision.hidden + 8) * positions
    kept = layer * (vision.layers - recomputed) + before
    formula = "S (w (8 H + 3 I) + 4 heads + 16) per layer; Qwen2.5-VL: S (w (11 H + 4 I) + 8 H + 4 heads + 8)"
    yield MemoryLine("activations of the vision encoder", kept, "gpu", "activation", formula, SOURCE, "pass")


def _encoder_layer_bytes(vision: VisionShape, width: int) -> int:
    """Return the bytes per position that autograd keeps of one layer of the encoder."""
    if not vision.is_gated:
        # Inputs and outputs of two norms with mean and deviation, queries, keys, values and output of attention with
        # the fp32 normalizer of each head, input of fc1's activation, its sigmoid, and the input of fc2.
        return width * (8 * vision.hidden + 3 * vision.intermediate) + 4 * vision.heads + 16
    # The values are a view that keeps the whole output of the joint projection; rotated queries and keys, output of
    # attention, and its copy in the order of the patches; inputs of three projections. Norms as in the decoder.
    inner = width * (9 * vision.hidden + 4 * vision.intermediate) + 4 * vision.heads
    return inner + 2 * _rms_norm_bytes(vision.hidden, width)


def _projector_bytes(shape: ModelShape, vision: VisionShape, width: int, sizes: tuple[int, int]) -> int:
    """Return what autograd keeps of the projector; `sizes`: positions in the encoder and image tokens."""
    positions, tokens = sizes
    if vision.is_gated:
        return positions * (_rms_norm_bytes(vision.hidden, width) + 3 * width * vision.hidden)
    return width * tokens * (vision.hidden + 2 * shape.hidden)


def _rms_norm_bytes(hidden: int, width: int) -> int:
    """Return an RMSNorm's input in fp32, its normalized input, and 1 / root mean square of a position."""
    return (4 + width) * hidden + 4
