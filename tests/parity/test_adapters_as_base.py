"""An adapter folder is merged into shards as it is into a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import adapter, merged_by_peft
from tests.workers import Workers


@pytest.mark.slow  # unit/models/test_adapters, contract/test_lora
@pytest.mark.parametrize(
    ("auto", "settings"),
    [
        ("AutoModelForCausalLM", {"use_dora": True}),
        ("AutoModelForSequenceClassification", {"modules_to_save": ["score"], "task_type": "SEQ_CLS"}),
    ],
)
def test_shards_hold_the_merged_weights(auto: str, settings: dict[str, Any], tmp_path: Path, two: Workers) -> None:
    import transformers

    of = getattr(transformers, auto)
    at = adapter(tmp_path, of, **settings)
    wanted = {name: value.numpy() for name, value in merged_by_peft(at, of).state_dict().items()}
    for found in two("tests.parity.adapter_cases:loaded", kind="zero3", path=str(at), auto=auto):
        assert found["sharded"]
        assert found["learns"]
        assert found["weights"].keys() <= wanted.keys()
        for name, value in found["weights"].items():
            assert np.allclose(value, wanted[name], atol=1e-7), name
