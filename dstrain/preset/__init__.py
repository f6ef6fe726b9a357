"""Presets: DeepSpeed JSONs that own memory and nothing else.

`read_preset` refuses what a preset does not own, `complete` adds what the recipe decides, `adopt` takes a public JSON over.
"""

from dstrain.preset.complete import Device, Precision, RunSettings, complete, resolve_precision
from dstrain.preset.convert import Adopted, adopt
from dstrain.preset.read import Preset, check_block, describe, preset_names, read_preset, summaries

__all__ = [
    "Adopted",
    "Device",
    "Precision",
    "Preset",
    "RunSettings",
    "adopt",
    "check_block",
    "complete",
    "describe",
    "preset_names",
    "read_preset",
    "resolve_precision",
    "summaries",
]
