"""DeepSpeed presets: JSON files that configure memory and nothing else."""

from dstrain.preset.complete import Device, Precision, RunSettings, complete_preset, resolve_precision
from dstrain.preset.convert import ConvertedPreset, convert_preset
from dstrain.preset.read import Preset, check_ds_config, describe_preset, preset_names, read_preset, summarize_presets

__all__ = [
    "ConvertedPreset",
    "Device",
    "Precision",
    "Preset",
    "RunSettings",
    "check_ds_config",
    "complete_preset",
    "convert_preset",
    "describe_preset",
    "preset_names",
    "read_preset",
    "resolve_precision",
    "summarize_presets",
]
