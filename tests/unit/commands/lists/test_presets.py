"""The list of presets shows the plan's memory of a known model."""

from __future__ import annotations

import json

from dstrain.preset import preset_names
from dstrain.units import format_bytes
from tests.vocabulary import invoke


def test_the_memory_in_the_list_is_that_of_the_plan() -> None:
    words = ["plan", "--task", "sft", "--set", "data.train=[]", "--set", "batch={micro: 1, accumulate: 1}", "--json"]
    words += ["--model-shape", "qwen3-8b", "--gpu-memory", "80GiB", "--gpus", "8"]
    planned = {row["preset"]: row["gpu_bytes"] for row in json.loads(invoke(*words).output)["presets"]}
    lines = invoke("presets").output.splitlines()
    assert lines[0].split("  ")[-2].strip() == "8B full, 8 GPUs"
    for name, line in zip(preset_names(), lines[1:], strict=False):
        assert format_bytes(planned[name]) in line, name
