"""Bytes per value: dtypes, states of optimizers, quantized weights. One entry per name that a recipe can write."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of an optimizer's state per trained parameter, without the fp32 master weights."""

    per_param: float
    states: str
    """The tensors it keeps, for the formula of a plan."""
    source: str
    per_hidden_param: float | None = None
    """Of the hidden matrices, where they have another state."""
    is_factored: bool = False
    """True where a matrix of R rows and C columns keeps R + C values instead of `per_param` bytes per value."""


OPTIMIZERS: dict[str, OptimizerBytes] = {
    "adamw": OptimizerBytes(8, "two fp32 moments", "Kingma and Ba, arXiv 1412.6980, algorithm 1"),
    "sgd": OptimizerBytes(0, "no state", "torch.optim.SGD without momentum"),
    # Codes of 8 bits, and an fp32 scale of every 256.
    "adamw_8bit": OptimizerBytes(2 + 8 / 256, "two 8-bit moments", "Dettmers et al., arXiv 2110.02861, section 2"),
    "paged_adamw_8bit": OptimizerBytes(
        2 + 8 / 256, "two 8-bit moments; paged to the host where the GPU is full", "arXiv 2305.14314, section 3"
    ),
    "lion": OptimizerBytes(4, "one fp32 average", "Chen et al., arXiv 2302.06675, algorithm 2"),
    "muon": OptimizerBytes(
        8, "two fp32 moments; one momentum for hidden matrices", "DeepSpeed runtime/zero/muon", per_hidden_param=4
    ),
    "adafactor": OptimizerBytes(
        4, "row and column means of matrices", "Shazeer and Stern, arXiv 1804.04235, algorithm 4", is_factored=True
    ),
}
"""optim.name -> bytes of state."""


@dataclass(frozen=True)
class QuantizedBytes:
    """Bytes per value of a frozen linear weight that is stored in fewer bits, its constants included."""

    per_param: float
    source: str


QUANTIZED_WEIGHTS: dict[str, QuantizedBytes] = {
    # Blocks of 64 with an 8-bit constant each, and an fp32 constant of every 256 of these.
    "nf4": QuantizedBytes(0.5 + 1 / 64 + 4 / (64 * 256), "Dettmers et al., arXiv 2305.14314, section 3"),
    # One fp32 scale per row, which is less than 0.1 % of a matrix with 4096 columns.
    "int8": QuantizedBytes(1.0, "Dettmers et al., arXiv 2208.07339, section 2"),
}
"""model.quantize -> bytes of a quantized weight. Embeddings, norms, the head and adapters keep the run's precision."""
