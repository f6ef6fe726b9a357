"""What a machine offers: each property is a line, and what would stop a run has a problem and a fix."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.commands import environment
from dstrain.commands.environment import EnvironmentLine, collect_lines
from dstrain.errors import UsageError


def test_the_environment_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from dstrain.commands.environment import collect_lines; "
    code += "collect_lines(Path('.')); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def line(name: str) -> EnvironmentLine:
    return next(found for found in collect_lines(Path("/")) if found.name == name)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_every_property_has_a_line() -> None:
    names = [found.name for found in collect_lines(Path("/"))]
    assert names == [
        "system", "libraries", "devices", "CUDA", "compiler", "Triton", "torchvision", "shared memory", "free disk",
        "ports",
    ]  # fmt: skip


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = environment.installed_version
    monkeypatch.setattr(environment, "installed_version", lambda name: None if name == "peft" else known(name))
    assert line("libraries").warning.startswith("peft not installed")


def test_gpus_without_a_torch_for_them_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 2)
    monkeypatch.setattr(environment, "detect_gpu_bytes", lambda env: ([24 << 30, 24 << 30], "pynvml"))
    monkeypatch.setattr(environment, "_torch_cuda_version", lambda: None)
    assert line("devices").value.startswith("2 GPUs (24.0 GiB, 24.0 GiB free)")
    assert "this torch cannot use them" in line("CUDA").warning
    monkeypatch.setattr(environment, "_torch_cuda_version", lambda: "12.8")
    assert line("CUDA").value.startswith("torch built for CUDA 12.8, NCCL ")
    assert not line("CUDA").warning


def test_the_cuda_version_is_read_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(environment.util, "find_spec", lambda name: SimpleNamespace(origin=f"{tmp_path}/__init__.py"))
    assert environment._torch_cuda_version() == "13.0"
    (tmp_path / "version.py").unlink()
    assert environment._torch_cuda_version() is None


def test_a_card_that_cuda_13_has_no_kernels_for_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 2)
    monkeypatch.setattr(environment, "list_gpu_capabilities", lambda: [(8, 0), (7, 0)])
    monkeypatch.setattr(environment, "_torch_cuda_version", lambda: "12.6")
    assert not line("CUDA").warning
    monkeypatch.setattr(environment, "_torch_cuda_version", lambda: "13.0")
    assert "compute capability 7.0, and CUDA 13.0 has no kernels below 7.5" in line("CUDA").warning


def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 1)
    assert "need g++ and nvcc of the CUDA toolkit" in line("compiler").warning


def test_what_triton_compiles_with_is_named_and_cc_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 1)
    monkeypatch.setattr("dstrain.resources.find_python_header", lambda: Path(__file__))
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(environment, "installed_version", lambda package: "0.8.5")
    value = f"liger-kernel: 0.8.5; compiles with {sys.executable} and Python.h: ok"
    assert line("Triton") == EnvironmentLine("Triton", value)
    monkeypatch.setenv("CC", "/nonexistent/gcc")
    monkeypatch.setattr("dstrain.resources.find_python_header", lambda: Path("/nonexistent/Python.h"))
    found = line("Triton")
    assert found.value.endswith(": missing")
    assert "need the compiler that CC names (/nonexistent/gcc) and Python.h (/nonexistent/Python.h)" in found.warning
    assert found.warning.endswith(
        "install gcc and Python's headers (apt install gcc python3-dev), or set batch.packing: false"
    )
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 0)
    assert not line("Triton").warning


def test_a_disk_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "disk_usage", raising(OSError(116, "Stale file handle")))
    assert "(Stale file handle); mount it again" in line("free disk").warning


def test_a_compiler_that_does_not_answer_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/no/such/compiler")
    assert line("compiler").value.startswith("/no/such/compiler")


def test_little_shared_memory_matters_to_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 2)
    assert "--shm-size=8g" in line("shared memory").warning
    assert "set TMPDIR to a larger disk" in line("free disk").warning


def test_no_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SHM", Path("/no/such/folder"))
    assert "mount a tmpfs there" in line("shared memory").warning


def test_ports_that_cannot_be_used_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_loopback", raising(UsageError("loopback is down; start it")))
    assert line("ports") == EnvironmentLine("ports", "unusable", "loopback is down; start it", is_fault=True)


def test_a_host_without_an_address_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_loopback", lambda: None)
    monkeypatch.setattr(environment.socket, "getaddrinfo", raising(OSError("unknown")))
    assert "/etc/hosts" in line("ports").warning
