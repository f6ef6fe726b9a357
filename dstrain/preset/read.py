"""Preset: a DeepSpeed JSON that speaks of memory only, read with every fault at once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, PresetError, suggest_name
from dstrain.preset.check import Issue, check_schema
from dstrain.preset.convert import convert_source
from dstrain.preset.read_json import read_json
from dstrain.preset.rules import check_conflicts, get_nested, get_offload_device, get_zero_stage
from dstrain.resources import find_resource_dir
from dstrain.source_map import SourceMap


@dataclass(frozen=True)
class Preset:
    """A memory strategy."""

    name: str
    """The file's name without `.json`."""
    path: Path
    block: dict[str, Any]
    """The JSON as written. Never changed: `complete` makes a copy."""

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return get_zero_stage(self.block)

    @property
    def offload_optimizer(self) -> str | None:
        """Where the optimizer's states lie instead of the GPU: cpu, nvme or None."""
        return get_offload_device(self.block, "offload_optimizer")

    @property
    def offload_param(self) -> str | None:
        """Where the weights lie instead of the GPU: cpu, nvme or None."""
        return get_offload_device(self.block, "offload_param")

    @property
    def micro(self) -> int | None:
        """Samples per forward pass, where the JSON gives a default."""
        return _to_int(self.block.get("train_micro_batch_size_per_gpu"))

    @property
    def accumulate(self) -> int | None:
        """Forward passes per step and process, where the JSON gives a default."""
        return _to_int(self.block.get("gradient_accumulation_steps"))

    @property
    def precision(self) -> str | None:
        """fp16, bf16 or fp32 where the JSON speaks. One block switched off says nothing; both switched off say fp32."""
        enabled = {name: get_nested(self.block, name, "enabled") for name in ("fp16", "bf16")}
        spoken = next((name for name, value in enabled.items() if value is True), None)
        return spoken or ("fp32" if all(value is False for value in enabled.values()) else None)


def read_preset(name_or_path: str, folder: Path | None = None) -> Preset:
    """The preset of this name in ds_configs, or of this path. PresetError with every fault at once."""
    path = _find_preset(name_or_path, folder or find_resource_dir("ds_configs"))
    text = read_json(path)
    findings = check_schema(text.values) + check_conflicts(text.values)
    if findings:
        faults = [Fault(text.get_location(finding.path), finding.problem, finding.fix) for finding in findings]
        raise PresetError(faults + _suggest_conversion(text, findings, path))
    return Preset(path.stem, path, text.values)


def check_ds_config(file: Path, ds_config: dict[str, Any]) -> dict[str, Any]:
    """The block of a file that another program wrote. PresetError with every fault at once."""
    findings = check_schema(ds_config) + check_conflicts(ds_config)
    if findings:
        raise PresetError(
            Fault(f"{file} {'.'.join(map(str, found.path))}", found.problem, found.fix) for found in findings
        )
    return ds_config


def preset_names(folder: Path | None = None) -> list[str]:
    """The names of the shipped presets, least sharded first."""
    paths = list((folder or find_resource_dir("ds_configs")).glob("*.json"))
    order = sorted(paths, key=lambda path: (path.stem.partition("_")[0], "nvme" in path.stem, path.stem))
    return [path.stem for path in order]


def summarize_presets(folder: Path | None = None) -> dict[str, str]:
    """Each shipped preset with a sentence on what it shards."""
    folder = folder or find_resource_dir("ds_configs")
    documented = _read_markdown_table(folder / "README.md")
    return {name: documented.get(name, "") for name in preset_names(folder)}


def describe_preset(name: str, folder: Path | None = None) -> str:
    """A preset in full: what it is for, its JSON, and one line for each of its keys."""
    folder = folder or find_resource_dir("ds_configs")
    preset, documented = read_preset(name, folder), _read_markdown_table(folder / "README.md")
    lines = [f"{preset.name}: {documented.get(preset.name, str(preset.path))}", ""]
    lines += [json.dumps(preset.block, indent=2), ""]
    unknown = "see DeepSpeed's documentation"
    keys = {key: documented.get(key.rpartition(".")[2], unknown) for key in _leaf_names(preset.block)}
    width = max(map(len, keys), default=0)
    return "\n".join(lines + [f"{key:<{width}}  {line}" for key, line in keys.items()]) + "\n"


def _find_preset(name_or_path: str, folder: Path) -> Path:
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
    mend = suggest_name(name_or_path, preset_names(folder))
    raise PresetError(Fault(f"ds_config {name_or_path}", f"there is no such preset in {folder}", mend))


def _suggest_conversion(source: SourceMap, issues: list[Issue], path: Path) -> list[Fault]:
    """The resolved JSON, where "auto" or learning is what stands in the way and nothing is left to decide."""
    kinds = {finding.kind for finding in issues}
    if not kinds & {"auto", "learning"} or "unknown" in kinds:  # dropping a misspelt block would change the memory
        return []
    adopted = convert_source(source)
    if adopted.faults:
        return []
    problem = f"this JSON would do:\n{adopted.json_text}"
    return [
        Fault(source.name, problem.rstrip(), f"`dstrain presets --adopt {path}` prints it and says what went where")
    ]


def _to_int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _read_markdown_table(path: Path) -> dict[str, str]:
    """First column -> second, of every table row whose first column is `code`."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1] for row in cells if len(row) > 1}


def _leaf_names(block: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all values."""
    names: list[str] = []
    for name, value in block.items():
        names += _leaf_names(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return names
