"""Worker functions of the parity tests of fused kernels, which Triton's interpreter computes."""

from __future__ import annotations

from typing import Any

from tests.parity import cases
from tools.triton_interpreter import use_interpreter


def one_step(**arguments: Any) -> dict[str, Any]:
    """Return what `cases.one_step` does, and what of the model runs with fused kernels. Collective."""
    use_interpreter()
    from dstrain.models import fused_kernels

    reports = []
    fuse = fused_kernels.fuse_kernels

    def fuse_and_report(model: Any) -> Any:
        reports.append(fuse(model))
        return reports[-1]

    fused_kernels.fuse_kernels = fuse_and_report
    try:
        return cases.one_step(**arguments) | {"fused": [dict(report.fused) for report in reports]}
    finally:
        fused_kernels.fuse_kernels = fuse
