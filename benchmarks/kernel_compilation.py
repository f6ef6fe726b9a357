"""Compile every kernel of liger that dstrain uses for NVIDIA's GPUs: no GPU is needed.

    .venv-cuda/bin/python -m benchmarks.kernel_compilation --to docs/measurements/kernels.md

Triton compiles each kernel for a compute capability, and ptxas, which torch for CUDA brings, makes machine code of it.
The types and constants are those of a launch in training: 16 bits, width 4096, 14336 inside of MLPs, heads of 128.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common import format_certificate, table, write_table

CAPABILITIES = (75, 80, 86, 89, 90, 100)
HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_WIDTH = 4096, 14336, 32, 8, 128
GATE = {"n_cols": INNER, "BLOCK_SIZE": 16384}
NORM = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": HIDDEN}
ADD_NORM = {"casting_mode": 0, "BLOCK_SIZE": HIDDEN}
PAIR = {"ffn_size": INNER, "BLOCK_SIZE": 16384}
ROPE = {
    "bs": 1, "cos_bs": 1, "n_qh": HEADS, "n_kh": KEY_HEADS, "hd": HEAD_WIDTH, "pad_n_qh": HEADS, "pad_n_kh": KEY_HEADS,
    "pad_hd": HEAD_WIDTH, "pad_rd": HEAD_WIDTH, "rd": HEAD_WIDTH, "BLOCK_SIZE": HEADS,
}  # fmt: skip
KERNELS: dict[str, dict[str, Any]] = {
    "rms_norm._rms_norm_forward_kernel": NORM,
    "rms_norm._rms_norm_backward_kernel": {**NORM, "COMPUTE_DW": True},
    "rms_norm._block_rms_norm_forward_kernel": {**NORM, "BLOCK_SIZE": 128, "BLOCK_ROW": 16},
    "rms_norm._block_rms_norm_backward_kernel": {**NORM, "BLOCK_SIZE": 128, "BLOCK_ROW": 16, "COMPUTE_DW": True},
    "fused_add_rms_norm._fused_add_rms_norm_forward_kernel": ADD_NORM,
    "fused_add_rms_norm._fused_add_rms_norm_backward_kernel": {**ADD_NORM, "has_dS_out": True, "COMPUTE_DW": True},
    "swiglu._swiglu_forward_kernel": GATE,
    "swiglu._swiglu_backward_kernel": GATE,
    "swiglu._swiglu_forward_kernel_tiled": {"BLOCK_SIZE": 1024},
    "swiglu._swiglu_backward_kernel_tiled": {"BLOCK_SIZE": 1024},
    "swiglu._swiglu_fused_gate_up_forward_kernel": PAIR,
    "swiglu._swiglu_fused_gate_up_backward_kernel": PAIR,
    "geglu._geglu_tanh_forward_kernel": GATE,
    "geglu._geglu_tanh_backward_kernel": GATE,
    "rope._triton_rope": {**ROPE, "BACKWARD_PASS": False},
}
"""Kernel -> its constants."""
FLOATS = ("eps", "offset", "gate_multiplier")
FP32_POINTERS = ("RSTD_ptr", "dW_ptr")


def compile_kernel(name: str, capability: int) -> int:
    """Return the bytes of the kernel's machine code. Raises what Triton or ptxas raises."""
    import importlib

    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    module, _, function = name.partition(".")
    kernel = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    half = "fp16" if capability < 80 else "bf16"
    constants = {**KERNELS[name]}
    if "X_dtype" in kernel.arg_names:
        constants["X_dtype"] = tl.float16 if half == "fp16" else tl.bfloat16
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in FLOATS:
            signature[argument] = "fp32"
        elif argument in FP32_POINTERS:
            signature[argument] = "*fp32"
        elif argument.endswith("_ptr") or argument in ("a", "b", "c", "dc", "cos", "sin"):
            signature[argument] = f"*{half}"
        else:
            signature[argument] = "i32"
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(key),): value for key, value in constants.items()})
    compiled = compile_source(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    return len(compiled.asm["cubin"])


def compile_for_all(name: str) -> dict[str, Any]:
    """Return the row of a kernel: the KiB of its machine code for each capability, or the error."""
    row: dict[str, Any] = {"kernel": name}
    for capability in CAPABILITIES:
        try:
            row[f"{capability / 10:.1f}"] = f"{compile_kernel(name, capability) / 1024:.0f} KiB"
        except Exception as error:  # of Triton or ptxas
            row[f"{capability / 10:.1f}"] = type(error).__name__
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    options = parser.parse_args()
    rows = [compile_for_all(name) for name in KERNELS]
    record = format_certificate()
    write_table(f"{record}\n\n{table(rows)}", "benchmarks.kernel_compilation", options.to)


if __name__ == "__main__":
    main()
