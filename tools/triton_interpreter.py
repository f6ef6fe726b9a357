"""Triton's kernels computed on the host by its interpreter: `python -m tools.triton_interpreter MODULE [ARGUMENT ...]`.

    python -m tools.triton_interpreter dstrain.cli train recipe.yaml --set model.kernels=liger

It needs the package triton, and no GPU: each program of a kernel runs in numpy, one after the other.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

TESTED_TRITON = ("3.4", "3.9")
"""Versions of triton whose private functions these patches know."""


def use_interpreter() -> None:
    """Let every kernel that is defined from now on run in Triton's interpreter. Call it before triton is imported.

    Raises ImportError without triton, and RuntimeError where it has been imported without the interpreter.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tools.triton_interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    from dstrain.patching import check_version

    check_version("triton", *TESTED_TRITON)
    if not getattr(interpreter, "is_patched_for_dstrain", False):
        interpreter.is_patched_for_dstrain = True
        _convert_float_arguments(interpreter)
        _compute_bfloat16(interpreter.InterpreterBuilder, interpreter.TensorHandle)
        _add_device_functions(interpreter.TensorHandle)


def _convert_float_arguments(interpreter: Any) -> None:
    """Give kernels their arguments in floating point as fp32 values; the interpreter leaves them Python's."""
    import numpy as np
    import triton.language as tl

    convert = interpreter._implicit_cvt

    def convert_with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = convert_with_floats


def _compute_bfloat16(builder: Any, handle: Any) -> None:
    """Let the interpreter compute with bfloat16, which it keeps as 16-bit integers, and round to the nearest value."""
    import numpy as np
    import triton.language as tl

    cast, binary_op, unary_op = builder.cast_impl, builder.binary_op, builder.unary_op

    def widen(values: Any) -> Any:
        return (values.astype(np.uint32) << 16).view(np.float32)

    def narrow(values: Any) -> Any:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # half to even
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)

    def cast_rounded(self: Any, source: Any, target: Any, *_rounding: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return handle(widen(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return handle(narrow(source.data), tl.bfloat16)
        return cast(self, source, target)

    def binary(self: Any, left: Any, right: Any, function: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
            return binary_op(self, left, right, function)
        result = function(widen(left.data), widen(right.data))
        return handle(result, tl.bfloat16) if result.dtype == bool else handle(narrow(result), tl.bfloat16)

    def unary(self: Any, argument: Any, function: Any) -> Any:
        if argument.dtype.scalar != tl.bfloat16:
            return unary_op(self, argument, function)
        return handle(narrow(function(widen(argument.data))), tl.bfloat16)

    builder.cast_impl, builder.binary_op, builder.unary_op = cast_rounded, binary, unary
    builder.create_fp_to_fp = cast_rounded


def _add_device_functions(handle: Any) -> None:
    """Give CUDA's own functions, which have no body in Python, one in numpy."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice

    def on_host(function: Any) -> Any:
        def call(values: Any) -> Any:
            result = function(values.handle.data.astype(np.float32)).astype(np.float32)
            return tl.tensor(handle(result, tl.float32), values.type)

        return call

    libdevice.rsqrt = on_host(lambda values: 1 / np.sqrt(values))
    libdevice.tanh = on_host(np.tanh)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    use_interpreter()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
