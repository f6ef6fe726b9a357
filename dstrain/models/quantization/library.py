"""Import of bitsandbytes, which the extra [quantize] installs."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dstrain.config.schema import RunConfig
from dstrain.errors import Fault, RecipeError

EXTRA = 'pip install "dstrain[quantize]"'

OPTIMIZERS_8BIT = ("adamw_8bit", "paged_adamw_8bit")
"""Values of optim.name that are bitsandbytes' optimizers."""


def iter_bitsandbytes_keys(config: RunConfig) -> Iterator[str]:
    """Yield the recipe's keys that need bitsandbytes."""
    if config.model.quantize is not None:
        yield "model.quantize"
    if config.optim.name in OPTIMIZERS_8BIT:
        yield "optim.name"


def import_bitsandbytes(key: str) -> Any:
    """Return the module bitsandbytes. Raises RecipeError for the recipe's `key` where it cannot be imported."""
    check_bitsandbytes(key)
    try:
        with _without_hub_kernels():
            import bitsandbytes
    except Exception as error:  # a build for another CUDA version fails with many errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RecipeError(Fault(key, f"bitsandbytes cannot be imported ({reason})", "install it again")) from error
    return bitsandbytes


def check_bitsandbytes(key: str) -> None:
    """Raise RecipeError for the recipe's `key` where bitsandbytes is not installed. Imports nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(Fault(key, "needs bitsandbytes, which is not installed", f"run {EXTRA}"))


def preload_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, before peft does: see `_without_hub_kernels`."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    try:
        with _without_hub_kernels():
            import bitsandbytes  # noqa: F401
    except Exception:  # peft tries again, and reports it
        return


@contextmanager
def _without_hub_kernels() -> Iterator[None]:
    """Hide the package `kernels` inside.

    On a CPU with AVX512-BF16 bitsandbytes downloads a kernel from the Hub and runs it while it is imported
    (backends/cpu/ops.py of 0.50), and logs a warning where it cannot. Code from the Hub runs only if the recipe names it.
    """
    logger, hidden = logging.getLogger("bitsandbytes.backends.cpu.ops"), "kernels" not in sys.modules
    level = logger.level
    logger.setLevel(logging.ERROR)
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        yield
    finally:
        logger.setLevel(level)
        if hidden:
            del sys.modules["kernels"]
