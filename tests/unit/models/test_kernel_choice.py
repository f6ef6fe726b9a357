"""Which runs take fused kernels: without a GPU and without liger-kernel."""

from __future__ import annotations

import pytest

from dstrain.models.fused_kernels import takes_fused_kernels


def test_a_run_that_was_trained_with_fused_kernels_is_used_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not any(map(takes_fused_kernels, ("auto", "liger", "none")))
