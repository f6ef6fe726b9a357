"""Published peaks of GPUs: matrix products in 16 bits, and the bandwidth of their memory."""

from __future__ import annotations

import re
from typing import NamedTuple


class GpuPeaks(NamedTuple):
    """Peaks of a GPU."""

    tflops: float
    """Dense TFLOP/s of matrix products in bf16, or in fp16 where the GPU has no bf16, with sums in fp32."""
    gb_per_second: float
    """10^9 bytes per second of the GPU's memory, read and written."""


PEAKS: dict[str, GpuPeaks] = {
    "B200": GpuPeaks(2250, 8000),
    "H200 NVL": GpuPeaks(835, 4800),
    "H200": GpuPeaks(989, 4800),
    "GH200": GpuPeaks(989, 4000),
    "H100 PCIe": GpuPeaks(756, 2000),
    "H100 NVL": GpuPeaks(835, 3900),
    "H100": GpuPeaks(989, 3350),
    "H800": GpuPeaks(989, 3350),
    "H20": GpuPeaks(148, 4000),
    "A100-SXM4-80GB": GpuPeaks(312, 2039),
    "A100 80GB PCIe": GpuPeaks(312, 1935),
    "A100": GpuPeaks(312, 1555),
    "A800": GpuPeaks(312, 2039),
    "A40": GpuPeaks(149.7, 696),
    "A30": GpuPeaks(165, 933),
    "A10": GpuPeaks(125, 600),
    "L40S": GpuPeaks(362, 864),
    "L40": GpuPeaks(181, 864),
    "L4": GpuPeaks(121, 300),
    "RTX A6000": GpuPeaks(154.8, 768),
    "RTX 6000 Ada": GpuPeaks(364.2, 960),
    "RTX 4090": GpuPeaks(165.2, 1008),
    "RTX 3090": GpuPeaks(71, 936),
    "V100-SXM2": GpuPeaks(125, 900),
    "V100-SXM3": GpuPeaks(125, 900),
    "V100-PCIE": GpuPeaks(112, 900),
    "T4": GpuPeaks(65, 320),
    "MI300X": GpuPeaks(1307.4, 5300),
}
"""Words of a device's name -> its peaks. The first name that fits counts.

From the data sheets and architecture white papers of NVIDIA (Volta, Turing, Ampere, Ada, Hopper, Blackwell) and AMD (CDNA 3).
A rate that is given with sparsity is halved. Of cards with one name and several memories: GH200 with 96 GB, A800 with 80 GB
on SXM, A100 with 40 GB where the name has no size.
"""


def find_peaks(device_name: str) -> GpuPeaks | None:
    """Return the peaks of a device; None for an unknown device, or a MIG slice of one."""
    if "MIG" in device_name:
        return None
    for name, peaks in PEAKS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name):
            return peaks
    return None


def find_peak_flops(device_name: str) -> float | None:
    """Return the device's dense peak in FLOP/s in 16 bits; None for an unknown device, or a MIG slice of one."""
    peaks = find_peaks(device_name)
    return None if peaks is None else peaks.tflops * 1e12
