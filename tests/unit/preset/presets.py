"""What tests of presets share: a JSON of one's own, and the refusal it meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import PresetError
from dstrain.preset import read_preset


def write(folder: Path, content: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2), encoding="utf-8")
    return path


def refusal(folder: Path, content: Any) -> str:
    with pytest.raises(PresetError) as caught:
        read_preset(str(write(folder, content)))
    return str(caught.value)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}
