"""Preset reading, listing and description."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, PresetError, SourceMap, lookup, suggest_name
from dstrain.preset.check import Issue, find_issues, get_offload_device, get_zero_stage, read_json
from dstrain.preset.convert import convert_source
from dstrain.resources import find_resource_dir


@dataclass(frozen=True)
class Preset:
    """A DeepSpeed JSON with memory settings only."""

    name: str
    """The file's name without `.json`."""
    path: Path
    block: dict[str, Any]
    """The JSON as written. Never changed: `complete_preset` copies it."""

    @property
    def stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return get_zero_stage(self.block)

    @property
    def offload_optimizer(self) -> str | None:
        """Return the offload device of the optimizer states: cpu, nvme or None."""
        return get_offload_device(self.block, "offload_optimizer")

    @property
    def offload_param(self) -> str | None:
        """Return the offload device of the weights: cpu, nvme or None."""
        return get_offload_device(self.block, "offload_param")

    @property
    def micro(self) -> int | None:
        """Return the JSON's default for samples per forward pass, None without one."""
        micro = self.block.get("train_micro_batch_size_per_gpu")
        return None if micro is None else int(micro)

    @property
    def accumulate(self) -> int | None:
        """Return the JSON's default for forward passes per step and process, None without one."""
        accumulate = self.block.get("gradient_accumulation_steps")
        return None if accumulate is None else int(accumulate)

    @property
    def precision(self) -> str | None:
        """Return the precision that the JSON sets: fp16 or bf16 if enabled, fp32 if both are disabled, else None."""
        fp16, bf16 = lookup(self.block, ("fp16", "enabled")), lookup(self.block, ("bf16", "enabled"))
        if fp16 is True:
            return "fp16"
        if bf16 is True:
            return "bf16"
        return "fp32" if fp16 is False and bf16 is False else None


def read_preset(name_or_path: str) -> Preset:
    """Read the preset of this name in ds_configs, or at this path. Raises PresetError with every fault found."""
    path = _find_preset(name_or_path)
    source = read_json(path)
    issues = find_issues(source.values)
    if issues:
        faults = [Fault(source.get_location(issue.path), issue.problem, issue.fix) for issue in issues]
        raise PresetError(faults + _suggest_conversion(source, issues, path))
    return Preset(path.stem, path, source.values)


def check_ds_config(file: Path, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that another program wrote. Raises PresetError with every fault found."""
    issues = find_issues(ds_config)
    if issues:
        raise PresetError(
            Fault(f"{file} {'.'.join(map(str, issue.path))}", issue.problem, issue.fix) for issue in issues
        )
    return ds_config


def preset_names() -> list[str]:
    """Return the names of the packaged presets, least sharded first."""
    paths = list(find_resource_dir("ds_configs").glob("*.json"))
    order = sorted(paths, key=lambda path: (path.stem.partition("_")[0], "nvme" in path.stem, path.stem))
    return [path.stem for path in order]


def summarize_presets() -> dict[str, str]:
    """Return each packaged preset with a sentence on what it shards."""
    documented = _read_documentation()
    return {name: documented.get(name, "") for name in preset_names()}


def describe_preset(name: str) -> str:
    """Return the full description of a preset: purpose, JSON, and one line per key."""
    preset, documented = read_preset(name), _read_documentation()
    lines = [f"{preset.name}: {documented.get(preset.name, str(preset.path))}", ""]
    lines += [json.dumps(preset.block, indent=2), ""]
    unknown = "see DeepSpeed's documentation"
    keys = {key: documented.get(key.rpartition(".")[2], unknown) for key in _leaf_names(preset.block)}
    width = max(map(len, keys), default=0)
    return "\n".join(lines + [f"{key:<{width}}  {line}" for key, line in keys.items()]) + "\n"


def _find_preset(name_or_path: str) -> Path:
    folder = find_resource_dir("ds_configs")
    named, given = folder / f"{name_or_path}.json", Path(name_or_path)
    looks_like_a_path = given.suffix == ".json" or len(given.parts) > 1
    if not looks_like_a_path and os.path.exists(named):
        return named
    if name_or_path and os.path.exists(given) and not given.is_dir():
        return given
    if name_or_path and os.path.exists(given):
        raise PresetError(Fault(f"ds_config {name_or_path}", "is a folder", "name a JSON file in it"))
    if looks_like_a_path:
        raise PresetError(Fault(name_or_path, "there is no such file", "name a file, or a preset of `dstrain presets`"))
    if name_or_path == "auto":
        fix = "name one with --ds-config; `dstrain plan RECIPE` names the one that it would take"
        raise PresetError(Fault("ds_config auto", "is decided by `dstrain train`, not by this command", fix))
    fix = suggest_name(name_or_path, preset_names())
    raise PresetError(Fault(f"ds_config {name_or_path}", f"there is no such preset in {folder}", fix))


def _suggest_conversion(source: SourceMap, issues: list[Issue], path: Path) -> list[Fault]:
    """Return a fault with the converted JSON, where "auto" or training keys are the only issues."""
    kinds = {issue.kind for issue in issues}
    if not kinds & {"auto", "learning"} or "unknown" in kinds:  # dropping a misspelt block would change the memory use
        return []
    converted = convert_source(source)
    if converted.faults:
        return []
    problem = f"this JSON would be accepted:\n{converted.json_text}"
    fix = f"`dstrain presets --adopt {path}` prints it, with a list of all changes"
    return [Fault(source.name, problem.rstrip(), fix)]


def _read_documentation() -> dict[str, str]:
    """Return preset or key -> what it does: the first two columns of the tables in ds_configs/README.md."""
    lines = (find_resource_dir("ds_configs") / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1] for row in cells if len(row) > 1}


def _leaf_names(block: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all values."""
    names: list[str] = []
    for name, value in block.items():
        names += _leaf_names(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return names
