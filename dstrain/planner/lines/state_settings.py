"""What weights, gradients and optimizer states depend on, and lines that all ZeRO stages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from dstrain.planner.byte_tables import DTYPE_BYTES, OPTIMIZERS, QUANTIZED_WEIGHTS
from dstrain.planner.line import Kind, MemoryLine, Place, When
from dstrain.planner.shape import ModelShape, ParamTensor

# In formulas: N processes, P parameters, T trained ones, w bytes of a weight, g bytes of an accumulated gradient.

ZERO_PAPER = "Rajbhandari et al., arXiv 1910.02054, section 5"


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """What weights, gradients and optimizer states depend on."""

    shape: ModelShape
    precision: str
    zero: Mapping[str, Any]
    """The block zero_optimization of the completed DeepSpeed JSON."""
    grad_bytes: int
    """Bytes of an accumulated gradient."""
    comm_bytes: int
    """Bytes of a gradient in the bucket of stage 3."""
    accumulate: int
    """Forward passes per step; any number above 1 where it varies."""
    world_size: int
    optimizer: str
    quantize: str | None = None
    device: str = "cuda"
    """cuda or cpu."""
    master_bytes: int = 4
    """Bytes of a master weight and of each value of the optimizer: 2 with bf16_master_weights_and_grads."""
    hidden_matrices: int = 0
    """Trained values that Muon updates."""

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return int(self.zero.get("stage", 0))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a weight in the run's precision."""
        return DTYPE_BYTES[self.precision]

    @property
    def trained(self) -> int:
        """Return the number of trained parameters."""
        return self.shape.count(trainable=True)

    @property
    def largest_trained(self) -> int:
        """Return the number of values of the largest trained tensor."""
        return self.shape.largest(trainable=True)

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Return True where DeepSpeed replaces ZeRO's optimizer: bf16 at stage 1, with sums in fp32."""
        return self.stage == 1 and self.precision == "bf16" and self.grad_bytes == 4

    def offload(self, name: str) -> str | None:
        """Return the device of offload_optimizer or offload_param: cpu, nvme or None."""
        device = (self.zero.get(name) or {}).get("device", "none")
        return None if device == "none" else str(device)

    def sharded(self, trainable: bool | None = None) -> int:
        """Return the values of one process's partitions at stage 3, where each tensor is padded to a multiple of N."""
        chosen = (one for one in self.shape.kinds if trainable in (None, one[0].is_trainable))
        return sum(ceil(tensor.numel / self.world_size) * count for tensor, count in chosen)


def make_line(
    name: str, count: tuple[float, float], place: Place, about: tuple[Kind, When], formula_and_source: tuple[str, str]
) -> MemoryLine:
    """Return a line of `count`: a number of values and the bytes of each."""
    return MemoryLine(name, round(count[0] * count[1]), place, about[0], *formula_and_source, when=about[1])


STATE: tuple[Kind, When] = ("state", "always")
BUFFER: tuple[Kind, When] = ("buffer", "always")
PASS: tuple[Kind, When] = ("buffer", "pass")
STEP: tuple[Kind, When] = ("buffer", "step")


def weight_bytes(settings: StateSettings, tensor: ParamTensor) -> float:
    """Return the bytes of one value of a tensor: those of its quantized form where it has one."""
    is_quantized = settings.quantize is not None and tensor.is_linear_weight and not tensor.is_trainable
    return QUANTIZED_WEIGHTS[str(settings.quantize)].per_param if is_quantized else settings.weight_bytes


def replicated_weights(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the weights by part, trained and frozen, where each process has all of them."""
    for trainable, word in ((True, "weights"), (False, "frozen weights")):
        chosen = [one for one in settings.shape.kinds if one[0].is_trainable == trainable]
        for part in dict.fromkeys(tensor.part for tensor, _ in chosen):
            own = [one for one in chosen if one[0].part == part]
            size = sum(tensor.numel * count * weight_bytes(settings, tensor) for tensor, count in own)
            yield make_line(f"{word}: {part}", (size, 1), "gpu", STATE, ("w P", f"{ZERO_PAPER}.1"))


def optimizer_line(settings: StateSettings, share: float, place: Place, source: str) -> MemoryLine:
    known, trained = OPTIMIZERS[settings.optimizer], settings.trained
    size = known.per_param * trained
    if known.per_hidden_param is not None:
        size -= (known.per_param - known.per_hidden_param) * settings.hidden_matrices
    if known.is_factored:
        chosen = [(tensor.shape, count) for tensor, count in settings.shape.kinds if tensor.is_trainable]
        size = known.per_param * sum(count * (sum(one) if len(one) > 1 else one[0]) for one, count in chosen)
    size *= settings.master_bytes / 4
    formula = f"{known.per_param * settings.master_bytes / 4:g} T{'' if share == 1 else ' / N'}: {known.states}"
    return make_line("optimizer states", (size * share, 1), place, STATE, (formula, f"{known.source}; {source}"))
