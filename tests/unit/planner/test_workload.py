"""The largest forward pass of a step, as the planner takes it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dstrain.errors import UsageError
from dstrain.planner import workload
from dstrain.planner.workload import detect_gpu_bytes, detect_gpu_name, parse_bytes


def test_a_query_computes_the_keys_of_its_block() -> None:
    from dstrain.planner.workload import mean_block_keys

    assert mean_block_keys(100) == 100
    assert mean_block_keys(128) == 128
    assert mean_block_keys(300) == (128 * 128 + 128 * 256 + 44 * 300) / 300
    assert mean_block_keys(0) == 0


# Sizes of GPU memory: what a user writes, and what the machine has.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("24 GB", 24 << 30),
        ("1.5TiB", 3 << 39),
        ("900MiB", 900 << 20),
        ("25769803776", 24 << 30),
    ],
)
def test_a_size_is_read_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_bytes(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["", "much", "24 gigabytes", "-1GiB", "0GiB", "9" * 400])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--gpu-memory: .* is not a size of memory; write it like 24GiB"):
        parse_bytes(text, "--gpu-memory")


@pytest.mark.parametrize("text", ["24", "512", "80000", "24B"])
def test_a_number_of_bytes_that_no_gpu_has_is_refused(text: str) -> None:
    number = text.removesuffix("B")
    with pytest.raises(
        UsageError, match=rf"--gpu-memory: '{text}' means bytes, less than any GPU has; write {number}GiB"
    ):
        parse_bytes(text, "--gpu-memory")


def test_a_size_in_kibibytes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--gpu-memory: '24K' is less than any GPU has; write 24GiB"):
        parse_bytes("24K", "--gpu-memory")


def test_the_variable_stands_for_any_gpu() -> None:
    assert detect_gpu_bytes({"DSTRAIN_GPU_MEMORY": "2GiB"}) == ([2 << 30], "DSTRAIN_GPU_MEMORY")


def test_hidden_gpus_have_no_memory() -> None:
    assert detect_gpu_bytes({"CUDA_VISIBLE_DEVICES": ""})[0] == []


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_ask_nvml", lambda: ([1 << 30, 80 << 30], "pynvml"))
    assert detect_gpu_bytes({"CUDA_VISIBLE_DEVICES": "1"})[0] == [80 << 30]
    assert detect_gpu_bytes({"CUDA_VISIBLE_DEVICES": "1,0,1"})[0] == [1 << 30, 80 << 30], "none, as CUDA reads it"
    assert detect_gpu_bytes({"CUDA_VISIBLE_DEVICES": "GPU-ab"})[0] == [1 << 30, 80 << 30]
    monkeypatch.setattr(workload, "list_gpu_uuids", lambda listed: ["GPU-cd12", "GPU-ab12"])
    assert detect_gpu_bytes({"CUDA_VISIBLE_DEVICES": "GPU-ab"})[0] == [80 << 30]
    monkeypatch.setattr(workload, "_ask_nvml_slice", lambda uuid: [20 << 30] if uuid == "MIG-4f6a" else [])
    assert detect_gpu_bytes({"CUDA_VISIBLE_DEVICES": "MIG-4f6a"})[0] == [20 << 30]
    assert detect_gpu_bytes({})[0] == [1 << 30, 80 << 30]


def test_the_name_of_the_gpu_is_that_of_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetName=lambda handle: b"NVIDIA H200"
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert detect_gpu_name({}) == "NVIDIA H200"
    assert detect_gpu_name({"CUDA_VISIBLE_DEVICES": "MIG-4f6a"}) is None, "a slice has a part of the peaks"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(workload, "_query_nvidia_smi", lambda field: ["Tesla T4", "Tesla T4"])
    assert detect_gpu_name({}) == "Tesla T4"
    monkeypatch.setattr(workload, "_query_nvidia_smi", lambda field: [])
    assert detect_gpu_name({}) is None
