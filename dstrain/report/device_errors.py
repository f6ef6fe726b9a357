"""Errors after which a GPU takes no more work in this process: of the card, and of a kernel."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

from dstrain.errors import DeviceError, one_line
from dstrain.report.observe import observing

if TYPE_CHECKING:
    import torch

_MESSAGE = re.compile(r"(CUDA error|CUDA driver error|Cuda failure \d+):? *'?([^\n']+)|(GPU is lost)")
"""Of torch and of NCCL."""
CARD_ERRORS = re.compile(
    r"ECC|NVLink|hardware stack|is lost|fallen off|busy or unavailable|unknown error|system not yet initialized|"
    r"GPU requires reset|contained",
    re.IGNORECASE,
)
CARD_CODES = (46, 214, 220, 714, 802, 999)
"""Codes of cudaError for a card that failed, and above them their messages (CUDA Runtime API, cudaError)."""
KERNEL_ERRORS = re.compile(
    r"illegal memory access|illegal instruction|illegal address|misaligned address|invalid program counter|"
    r"unspecified launch failure|launch timed out|device-side assert|operation not supported on global/shared",
    re.IGNORECASE,
)
KERNEL_CODES = (700, 702, 710, 715, 716, 717, 718, 719)
"""Codes and messages for a kernel that failed."""


def explain_device_error(error: BaseException, device: torch.device, where: str) -> DeviceError | None:
    """Return the error for the user if this error, or one of its causes, is one of a GPU; else None.

    `where`: what was being done, such as `rank 0, step 3`. Such an error is sticky: each later call of CUDA in the
    process returns it.
    """
    cause: BaseException | None = error
    while cause is not None:
        reason, code = _read_reason(cause), getattr(cause, "error_code", None)  # AcceleratorError has one
        for pattern, codes, template in (
            (CARD_ERRORS, CARD_CODES, CARD_TEXT),
            (KERNEL_ERRORS, KERNEL_CODES, KERNEL_TEXT),
        ):
            if reason and (code in codes or pattern.search(reason)):
                return DeviceError(f"{where}: " + template.format(reason=reason, place=describe_device(device)))
        cause = cause.__cause__
    return None


CARD_TEXT = (
    "the card failed: {reason} on {place}, and the recipe is not the cause; the same command goes on from the last "
    "checkpoint, if need be after a reset of the card (nvidia-smi --gpu-reset) or without it (CUDA_VISIBLE_DEVICES); "
    "dmesg and nvidia-smi -q say more"
)
KERNEL_TEXT = (
    "a kernel failed: {reason} on {place}, by its own fault, by what it was given or by the card, and the recipe's settings "
    "are not the cause; the same command goes on from the last checkpoint; if it fails at the same step, "
    "CUDA_LAUNCH_BLOCKING=1 names the operation, and if it fails at others, leave out the card (CUDA_VISIBLE_DEVICES)"
)


def _read_reason(error: BaseException) -> str:
    """Return `uncorrectable ECC error encountered`; empty where the error is none of CUDA."""
    # torch's AcceleratorError is a RuntimeError, and so are those of older versions and of NCCL.
    found = _MESSAGE.search(str(error)) if isinstance(error, RuntimeError) else None
    return one_line((found[2] or found[3]).strip()) if found else ""


def describe_device(device: torch.device) -> str:
    """Return `gpu07, cuda:1 (NVIDIA H200, CUDA_VISIBLE_DEVICES 3, GPU-4f6a..., PCI 0000:1b:00)`, as far as it is known."""
    details = []
    if device.type == "cuda":
        with observing("properties of the GPU"):
            details = _list_details(device)
    return f"{socket.gethostname()}, {device}" + (f" ({', '.join(details)})" if details else "")


def _list_details(device: torch.device) -> list[str]:
    import torch

    index = device.index or 0
    properties = torch.cuda.get_device_properties(index)  # torch has them: no call of CUDA
    details = [properties.name]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip():
        details.append(f"CUDA_VISIBLE_DEVICES {visible[index].strip()}")
    if getattr(properties, "uuid", None):
        details.append(f"GPU-{properties.uuid}")
    if hasattr(properties, "pci_bus_id"):  # from torch 2.7 on
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        details.append("PCI {:04x}:{:02x}:{:02x}".format(*place))
    return details
