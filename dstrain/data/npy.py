"""Arrays in .npy files that may come from elsewhere: the header is compared with the file before memory is asked for."""

from __future__ import annotations

import math
import os
import tokenize
from pathlib import Path
from typing import IO, Literal

import numpy as np


def read_npy_header(file: IO[bytes], size: int) -> tuple[np.dtype, tuple[int, ...]]:
    """Read the header of a .npy file of `size` bytes, up to the values; return their dtype and shape.

    Raises ValueError if the header cannot be read or does not fit the size.
    """
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran_order, dtype = read_header(file)
        length = math.prod(shape) * dtype.itemsize
    # numpy evaluates the header as Python.
    except (SyntaxError, tokenize.TokenError, MemoryError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    if dtype.hasobject or is_fortran_order or min(shape, default=0) < 0:
        raise ValueError("its header names values that dstrain does not write")
    if length != size - file.tell():
        raise ValueError(f"its header names {length} bytes of values, and it has {size - file.tell()}")
    return dtype, shape


def load_npy(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """Return the array of a .npy file. Raises OSError, or ValueError for a damaged file."""
    with path.open("rb") as file:
        read_npy_header(file, os.fstat(file.fileno()).st_size)
    return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
