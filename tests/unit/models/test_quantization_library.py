"""The import of bitsandbytes: the extra that it needs, and no code from the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstrain.errors import RecipeError
from dstrain.models import quantization


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r'optim\.name: needs bitsandbytes.* run pip install "dstrain\[quantize\]"'):
        quantization.import_bitsandbytes("optim.name")


KERNELS = """
def get_kernel(*words, **more):
    raise SystemExit("downloads a kernel")
"""


@pytest.mark.slow  # a process of its own: ten seconds
def test_importing_bitsandbytes_downloads_no_kernel(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")
    (tmp_path / "kernels.py").write_text(KERNELS)
    program = "import dstrain.models.quantization as library; library.import_bitsandbytes('x'); import kernels"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "gemm_4bit_forward" not in done.stderr
