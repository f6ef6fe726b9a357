"""Errors of a GPU: of the card or of a kernel, on which card, and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dstrain.errors import DeviceError
from dstrain.report.device_errors import describe_device, explain_device_error

GPU = torch.device("cuda", 1)
HINTS = "\nCUDA kernel errors might be asynchronously reported at some other API call\n"


@pytest.fixture(autouse=True)
def _one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid="4f6a1c1e-0000", pci_domain_id=0, pci_bus_id=27, pci_device_id=0
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu07")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")


def explain(error: BaseException) -> str:
    found = explain_device_error(error, GPU, "rank 1, step 3")
    assert found is not None
    assert isinstance(found, DeviceError)
    assert found.exit_code == 1
    return str(found)


@pytest.mark.parametrize(
    "reason",
    [
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected during the execution",
        "CUDA-capable device(s) is/are busy or unavailable",
        "hardware stack error",
        "unknown error",
    ],
)
def test_an_error_of_the_card_is_not_of_the_recipe(reason: str) -> None:
    text = explain(RuntimeError(f"CUDA error: {reason}{HINTS}"))
    assert text.startswith(
        f"rank 1, step 3: the card failed: {reason} on gpu07, cuda:1 (NVIDIA H200, CUDA_VISIBLE_DEVICES 3, "
        "GPU-4f6a1c1e-0000, PCI 0000:1b:00), and the recipe is not the cause; the same command goes on from the last checkpoint"
    )
    assert "nvidia-smi --gpu-reset" in text


@pytest.mark.parametrize(
    "reason",
    [
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "an illegal instruction was encountered",
        "unspecified launch failure",
        "misaligned address",
    ],
)
def test_an_error_of_a_kernel_names_the_way_to_it(reason: str) -> None:
    text = explain(RuntimeError(f"CUDA error: {reason}{HINTS}"))
    assert text.startswith(f"rank 1, step 3: a kernel failed: {reason} on gpu07, cuda:1 (")
    assert "CUDA_LAUNCH_BLOCKING=1 names the operation" in text


@pytest.mark.parametrize(("code", "words"), [(214, "the card failed"), (700, "a kernel failed")])
def test_the_code_of_an_error_counts_whatever_its_words(code: int, words: str) -> None:
    error = RuntimeError("CUDA error: a message of a newer driver")
    error.error_code = code  # type: ignore[attr-defined]
    assert words in explain(error)


def test_errors_of_nccl_and_causes_count() -> None:
    assert "the card failed" in explain(RuntimeError("Cuda failure 214 'uncorrectable ECC error encountered'"))
    error = ValueError("in the task")
    error.__cause__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "a kernel failed" in explain(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error: unknown error"),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert explain_device_error(error, GPU, "rank 1") is None


def test_a_card_that_does_not_answer_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr("torch.cuda.get_device_properties", fail)
    assert describe_device(GPU) == "gpu07, cuda:1"
    assert describe_device(torch.device("cpu")) == "gpu07, cpu"
