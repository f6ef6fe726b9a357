"""Failed allocations among errors, as torch and numpy word them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dstrain.errors import OutOfMemoryError, RunError
from dstrain.report.allocation_errors import AllocationFailure, find_allocation_failure

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free. "
    "Including non-PyTorch memory, this process has 77.90 GiB memory in use."
)


def test_a_failure_of_torch_on_a_gpu_is_found() -> None:
    failure = find_allocation_failure(torch.OutOfMemoryError(CUDA))
    assert failure == AllocationFailure("gpu", round(2.5 * 2**30), CUDA)
    assert failure.describe() == "2.5 GiB on the GPU"


def test_a_failure_of_torch_on_a_cpu_is_found() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    failure = find_allocation_failure(caught.value)
    assert failure is not None
    assert (failure.place, failure.requested_bytes) == ("host", 2**50)
    assert failure.text.startswith("DefaultCPUAllocator: can't allocate memory")


def test_failures_of_numpy_and_python_are_found() -> None:
    with pytest.raises(MemoryError) as caught:
        np.ones(2**46)
    assert find_allocation_failure(caught.value) == AllocationFailure("host", 512 * 2**40, str(caught.value))
    assert find_allocation_failure(MemoryError()) == AllocationFailure("host", None, "MemoryError")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_failures_of_libraries_beside_torch_are_found(text: str) -> None:
    failure = find_allocation_failure(RuntimeError(text))
    assert failure is not None
    assert (failure.place, failure.requested_bytes, "\n" in failure.text) == ("gpu", None, False)


def test_the_cause_of_an_error_counts_and_other_errors_do_not() -> None:
    error = RunError("samples 3 could not be made into a batch")
    error.__cause__ = MemoryError()
    assert find_allocation_failure(error) is not None
    assert find_allocation_failure(RunError("CUDA out of memory")) is None
    assert find_allocation_failure(OutOfMemoryError("out of memory: rank 1")) is None
    assert find_allocation_failure(ValueError("out of memory")) is None
    assert find_allocation_failure(None) is None
