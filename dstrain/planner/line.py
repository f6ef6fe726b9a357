"""One line of a memory plan: what takes memory, how much, where and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["gpu", "host", "nvme"]
Kind = Literal["state", "buffer", "activation", "reserve"]
When = Literal["always", "pass", "head", "layer", "step"]


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one process."""

    name: str
    num_bytes: int
    place: Place
    """`gpu` means the memory of the process's own device, on a CPU run its host memory."""
    kind: Kind
    formula: str
    source: str
    """Paper and equation, or file of DeepSpeed, torch or dstrain, from which the formula follows."""
    when: When = "always"
    """pass: during forward and backward passes; head, layer: only while the head, or one layer, is in its backward pass;
    step: while the optimizer updates the weights. The peak is `always` + max(`pass` + max(`head`, `layer`), `step`)."""
