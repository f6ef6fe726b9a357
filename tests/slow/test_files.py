"""LLaMA-Factory's demo files train unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFIG = (
    "{model_type: llama, vocab_size: 600, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 8192}"
)


@pytest.mark.parametrize(
    ("task", "name"), [("rm", "dpo_en"), ("dpo", "dpo_en"), ("dpo", "dpo_zh"), ("sft", "dpo_en"), ("kto", "kto_en")]
)
def test_a_demo_file_trains_as_it_is(task: str, name: str, data: Path, tmp_path: Path) -> None:
    file = data / f"prefs/llamafactory/{name}_demo.json"
    sets = [f"data.train={file}", "data.eval_fraction=0.1", "data.max_length=8192", f"model.config={CONFIG}", "steps=4",
            "batch.total=4", "batch.micro=2"]  # fmt: skip
    command = [sys.executable, "-m", "dstrain", "train", "--task", task, "--num-gpus", "2", "--run-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *(word for pair in sets for word in ("--set", pair))], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{task}: 216 samples" in done.stdout, "none is left out"
