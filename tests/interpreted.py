"""Where Triton's interpreter cannot compute fused kernels, tests of them are skipped with the reason."""

from __future__ import annotations

import importlib.util

import pytest


def find_missing() -> str:
    """Return why fused kernels are not tested here; "" where they are."""
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    return f"fused kernels are not tested: {' and '.join(missing)} not installed" if missing else ""


def use_interpreted_kernels() -> None:
    """Let liger's kernels be computed on the CPU; skip the module that calls this where that is not possible."""
    if find_missing():
        pytest.skip(find_missing(), allow_module_level=True)
    from tools.triton_interpreter import use_interpreter

    try:
        use_interpreter()
    except RuntimeError as error:
        pytest.skip(str(error), allow_module_level=True)
