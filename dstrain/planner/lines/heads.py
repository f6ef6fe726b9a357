"""Memory of the output head and its loss, which never hold the logits of all tokens."""

# Shapes: N targets, V vocabulary, H width.

from __future__ import annotations

from collections.abc import Iterator

from dstrain.planner.line import MemoryLine
from dstrain.planner.shape import ModelShape
from dstrain.planner.workload import Workload

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""MAX_CHUNK_BYTES of models/heads/scores.py, which imports torch; a test compares."""
KEPT_SHARE, SLICE_SHARE, BLOCK_SHARE = 3.0, 0.5, {"cpu": 1 / 64, "cuda": 0.5}
"""Those of models/heads/linear_head.py."""
SOURCE = "dstrain/models/heads/linear_head.py"
CHUNK_COPIES = 3
"""Copies of a chunk of fp32 logits that autograd holds where the head is not a plain linear layer."""


def head_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the head."""
    if workload.is_scored or shape.vocab <= 1:
        return
    targets, vocab, limit = workload.targets, shape.vocab, CHUNK_BYTES[workload.device]
    yield MemoryLine(
        "inputs of the head", 2 * width * targets * shape.hidden + 24 * targets, "gpu", "activation", "2 w N H",
        f"{SOURCE}, _LinearScores", "pass",
    )  # fmt: skip
    kept = num_rows(shape, workload, width)
    if kept:
        yield MemoryLine(
            "errors of the head", width * kept * vocab, "gpu", "activation",
            f"w V min(N, {KEPT_SHARE:g} x {limit >> 20} MiB / (w V))", f"{SOURCE}, KEPT_SHARE", "head",
        )  # fmt: skip
    block = min(targets * vocab * 4, limit * BLOCK_SHARE[workload.device])
    slices = min(max(targets - kept, 0) * vocab * width, limit * SLICE_SHARE)
    yield MemoryLine(
        "logits of a slice", round(3 * block + slices), "gpu", "activation", "3 fp32 blocks and a slice",
        f"{SOURCE}, SLICE_SHARE and BLOCK_SHARE", "head",
    )  # fmt: skip
    if kept and kept < targets:
        # The gradient itself is counted with the gradients, or as the gradient of one tensor.
        yield MemoryLine(
            "fp32 sum of the head's gradient", 4 * vocab * shape.hidden, "gpu", "activation",
            "4 V H where errors are recomputed", f"{SOURCE}, _parameter_gradient", "head",
        )  # fmt: skip


def num_rows(shape: ModelShape, workload: Workload, width: int) -> int:
    """Return the targets whose errors are kept for the gradient of the head."""
    if not trains_head(shape):
        return 0
    return min(workload.targets, max(1, int(CHUNK_BYTES[workload.device] * KEPT_SHARE) // (width * shape.vocab)))


def trains_head(shape: ModelShape) -> bool:
    """Return True where the head's weight, or the embedding that it is tied to, is trained."""
    part = "embedding" if shape.tied else "head"
    return any(tensor.is_trainable for tensor in shape.tensors if tensor.part == part)


def saved_head_bytes(shape: ModelShape, workload: Workload, width: int) -> int:
    """Return what autograd keeps of the head between forward and backward pass."""
    if workload.is_scored:
        return 0
    inputs = 2 * width * workload.targets * shape.hidden + 8 * workload.targets
    return inputs + width * num_rows(shape, workload, width) * shape.vocab
