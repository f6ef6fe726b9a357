"""Detection of failed allocations, on a GPU and on the host, among the errors of torch and numpy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dstrain.units import format_bytes

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_GPU_MESSAGE = re.compile(
    r"(CUDA|HIP|XPU)\S* (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
"""Messages of plain RuntimeErrors: of libraries that allocate beside torch's allocator."""
_HOST_MESSAGE = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory|std::bad_alloc"
)
_CUDA_SIZE = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_CPU_SIZE = re.compile(r"you tried to allocate (\d+) bytes")
_NUMPY_SIZE = re.compile(r"Unable to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB) for an array")


@dataclass(frozen=True)
class AllocationFailure:
    """An allocation that failed."""

    place: Literal["gpu", "host"]
    requested_bytes: int | None
    """Size of the allocation as its library reports it; None if it does not."""
    text: str
    """First sentence of the library's message."""

    def describe(self) -> str:
        """Return `2.5 GiB on the GPU`."""
        size = "an allocation" if self.requested_bytes is None else format_bytes(self.requested_bytes)
        return f"{size} {'on the GPU' if self.place == 'gpu' else 'of host memory'}"


def find_allocation_failure(error: BaseException | None) -> AllocationFailure | None:
    """Return the failed allocation if the error, or one of its causes, is one; else None."""
    while error is not None:
        if (failure := _read_failure(error)) is not None:
            return failure
        error = error.__cause__
    return None


def _read_failure(error: BaseException) -> AllocationFailure | None:
    # By name, since this module does not import torch; an error of a lost connection is none of memory.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    if "DistError" in kinds:
        return None
    if "OutOfMemoryError" in kinds and "DstrainError" not in kinds:
        place: Literal["gpu", "host"] = "gpu"
    elif isinstance(error, MemoryError):
        place = "host"
    elif isinstance(error, RuntimeError) and _GPU_MESSAGE.search(text):
        place = "gpu"
    elif isinstance(error, (RuntimeError, OSError)) and _HOST_MESSAGE.search(text):
        place = "host"
    else:
        return None
    sentence = re.sub(r"^\[enforce fail at \S+\] [^.]*\. ", "", text.split("\n", 1)[0])[:300]
    return AllocationFailure(place, _read_size(text), sentence or type(error).__name__)


def _read_size(text: str) -> int | None:
    if found := _CPU_SIZE.search(text):
        return int(found[1])
    if found := _CUDA_SIZE.search(text) or _NUMPY_SIZE.search(text):
        return round(float(found[1]) * _UNITS[found[2]])
    return None
