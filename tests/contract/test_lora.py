"""Adapters leave the run as adapters, or as one whole model that says the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from dstrain.tasks import find_task
from tests.resume.test_resume import RUN
from tests.workers import WorkerError, Workers

CASES = "tests.contract.lora_cases:"


@pytest.mark.parametrize(("preset", "dora"), [pytest.param("zero2", False, marks=pytest.mark.slow), ("zero3", True)])
def test_adapters_and_the_merged_model_say_the_same(
    preset: str, dora: bool, tmp_path: Path, one: Workers, two: Workers
) -> None:
    values = find_task("dpo").tiny(tmp_path)
    base = str(tmp_path / "base")
    one(CASES + "save_base", folder=base, recipe=values)
    lora = {"rank": 4, "alpha": 16.0, "dora": dora}
    values |= {"model": {"path": base, "lora": lora}, "ds_config": preset, "optim": {"lr": 1e-2}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    apart = one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "apart"), merge=False)[0]
    merged = one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "merged"), merge=True)[0]
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= set(apart["files"])
    assert "model.safetensors" not in apart["files"]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(merged["files"])
    assert not any("adapter" in name for name in merged["files"])
    np.testing.assert_allclose(apart["logits"], merged["logits"], atol=1e-4)
    assert max(apart["difference"], merged["difference"]) <= 1e-5
    recipe = yaml.safe_load((tmp_path / "merged/dstrain_recipe.yaml").read_text())
    assert recipe["options"]["ref_model"] == base, "what it was compared with"
    (tmp_path / "base/model.safetensors").write_bytes((tmp_path / "merged/model.safetensors").read_bytes())
    with pytest.raises(WorkerError, match="trained on other weights"):
        one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "other"), merge=True)


def test_adapters_on_drawn_weights_are_merged_or_not_written(tmp_path: Path, one: Workers, two: Workers) -> None:
    values = find_task("dpo").tiny(tmp_path)
    values["model"] |= {"lora": {"rank": 2}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values | {"steps": 1}))
    two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    with pytest.raises(WorkerError, match="add --merge-lora"):
        one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"), merge=False)
    assert not (tmp_path / "out").exists()
    one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"), merge=True)
