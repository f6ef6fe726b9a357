"""Skips tests of fused kernels, with a reason, where Triton's interpreter cannot compute them."""

from __future__ import annotations

import importlib.util

import pytest


def use_interpreted_kernels() -> None:
    """Let liger's kernels be computed on the CPU; skip the module that calls this where that is not possible."""
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: fused kernels are not tested", allow_module_level=True)
    from tools.triton_interpreter import use_interpreter

    try:
        use_interpreter()
    except RuntimeError as error:
        pytest.skip(str(error), allow_module_level=True)
