"""Imported by every Python that starts with the emulator: what torch needs to compute on an emulated device.

The modules of this folder import torch only after the program has done so: an import costs seconds.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class PrepareTorch(importlib.abc.MetaPathFinder):
    """Calls `emulated_values.install` once torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)  # who asks for the spec may not import it
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            import emulated_values

            emulated_values.install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


if "libcudart" in os.environ.get("LD_PRELOAD", ""):
    sys.meta_path.insert(0, PrepareTorch())
