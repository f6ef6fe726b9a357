"""Lookup of packaged resources, of the folder for compiled kernels, and of what Triton compiles with."""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def find_resource_dir(name: str) -> Path:
    """Return the packaged folder of this name, such as `ds_configs` or `launchers`.

    Raises FileNotFoundError.
    """
    package = Path(__file__).parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"dstrain contains a folder `{name}`, but neither {package} nor {package.parent} has it")


def get_extensions_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder for kernels that torch compiles."""
    if folder := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder).expanduser()
    # As torch does: for a user without a home folder `~` stays as it is, without an error.
    return Path(os.path.expanduser(environment.get("XDG_CACHE_HOME") or "~/.cache")) / "torch_extensions"


def find_c_compiler(environment: Mapping[str, str]) -> str:
    """Return the C compiler that Triton takes: CC, else gcc or clang; empty without one."""
    return environment.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""


def find_python_header() -> Path:
    """Return where Python.h has to be for Triton."""
    # As in triton/runtime/build.py: on Debian the headers are not where the default scheme of Python says.
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)
    return Path(paths["include"]) / "Python.h"


def list_missing_for_triton(environment: Mapping[str, str]) -> list[str]:
    """Return what is missing to compile Triton's launcher, which is written in C: the compiler, Python.h."""
    compiler = find_c_compiler(environment)
    missing = [] if compiler else ["a C compiler (gcc)"]
    if compiler and shutil.which(compiler) is None:
        missing.append(f"the compiler that CC names ({compiler})")
    if not find_python_header().is_file():
        missing.append(f"Python.h ({find_python_header()})")
    return missing


def is_triton_ready() -> bool:
    """Return True where Triton has its launcher, or can compile it."""
    try:
        runtime = importlib.import_module("triton.runtime")  # installed with torch for CUDA alone
        return runtime.driver.active.utils is not None
    except Exception:  # without a compiler or Python.h, each in its own way
        return False


TRITON_PACKAGES = "install gcc and Python's headers (apt install gcc python3-dev)"
"""Fix for what `list_missing_for_triton` returns."""
TRITON_FIX = f"{TRITON_PACKAGES}, or set batch.packing: false"
"""The same for attention of packed batches."""
