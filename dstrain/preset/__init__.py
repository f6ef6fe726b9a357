"""DeepSpeed presets: JSON files that configure memory and nothing else."""

from dstrain.preset.convert import ConvertedPreset, convert_preset
from dstrain.preset.read import Preset, check_ds_config, describe_preset, preset_names, read_preset, summarize_presets

__all__ = [
    "ConvertedPreset",
    "Preset",
    "check_ds_config",
    "convert_preset",
    "describe_preset",
    "preset_names",
    "read_preset",
    "summarize_presets",
]
