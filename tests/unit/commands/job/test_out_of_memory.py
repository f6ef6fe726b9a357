"""A command that runs out of memory says so in one line, with what to change on its command line."""

from __future__ import annotations

import pytest
import torch

from dstrain.commands.run_job import explain_out_of_memory
from dstrain.errors import OutOfMemoryError

GPU = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB"
HOST = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."


@pytest.mark.parametrize(
    ("command", "error", "fix"),
    [
        ("generate", torch.OutOfMemoryError(GPU), r"2\.5 GiB on the GPU .*; ask for fewer prompts .*--batch 1.*zero3"),
        ("evaluate", torch.OutOfMemoryError(GPU), r"2\.5 GiB on the GPU .*--set batch\.micro=1.*--ds-config zero3"),
        ("prepare", RuntimeError(HOST), r"4\.0 GiB of host memory .*; .*fewer processes on this host"),
        ("bench", MemoryError(), r"an allocation of host memory could not be allocated; "),
    ],
)
def test_a_failed_allocation_names_the_fix(command: str, error: Exception, fix: str) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"^dstrain {command}: {fix}"), explain_out_of_memory(command):
        raise error


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^out of luck$"), explain_out_of_memory("evaluate"):
        raise RuntimeError("out of luck")
