"""What a process keeps for itself of a model in 16 bits is little: its files stay mapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loading import in_a_process, save_base

BOUND = 0.2
"""Bytes of anonymous memory for each parameter of policy and reference."""


@pytest.mark.slow  # loading in 16 bits: parity/test_precision; benchmarks.loading measures the memory
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux alone tells a process's own memory")
def test_a_run_in_16_bits_keeps_its_weights_in_mapped_files(tmp_path: Path) -> None:
    save_base(tmp_path, "3m", "bfloat16")
    found = in_a_process(tmp_path, "3m", "dpo", {})
    assert found["parameters"] > 7e6
    assert found["anonymous"] / found["parameters"] <= BOUND
    assert found["peak"] / found["parameters"] <= BOUND
