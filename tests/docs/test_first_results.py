"""README's first results run as they are written: a known model and a public data set, here by stand-ins, and the demo."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from tests.chat_templates import QWEN as QWEN_TEMPLATE
from tests.tiny import tiny_recipe
from tests.vocabulary import write_jsonl
from tests.workers import ROOT

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## First results\n")[2].partition("\n## ")[0]
DEMO, QWEN = [
    [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("dstrain ")]
    for block in re.findall(r"```bash\n(.*?)```", SECTION, flags=re.S)
]
STAND_INS = {"data.train=trl-lib/Capybara": "data.train=capybara.jsonl", "steps=200": "steps=2"}
"""Words of README's commands that need a network or minutes, and what takes their place here."""


def run(words: list[str], folder: Path) -> str:
    command = [sys.executable, "-m", *(STAND_INS.get(word, word) for word in words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def write_small_qwen(folder: Path, scratch: Path) -> None:
    """Write a Qwen2 of two layers with random weights, and a tokenizer with Qwen's kind of template."""
    task: Any = make_task(RunConfig.model_validate(tiny_recipe("sft", scratch)))
    task.tokenizer.chat_template = QWEN_TEMPLATE
    task.tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(task.tokenizer) + 64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_the_section_has_a_known_model_and_the_demo() -> None:
    assert [words[1] for words in QWEN] == ["train", "generate"]
    assert [words[1] for words in DEMO] == ["train", "evaluate", "export"]
    assert all(word in {word for words in QWEN for word in words} for word in STAND_INS)


@pytest.mark.slow
def test_the_lines_on_a_known_model_run(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    write_small_qwen(tmp_path / "Qwen/Qwen2.5-0.5B-Instruct", tmp_path / "scratch")
    turns = [{"role": "user", "content": "How many is 1 and 1?"}, {"role": "assistant", "content": "2"}]
    write_jsonl(tmp_path / "capybara.jsonl", [{"messages": turns}] * 32)
    for words in QWEN:
        output = run(words, tmp_path)
    assert "How do I repot a fern?" in output


@pytest.mark.slow
def test_the_lines_of_the_demo_run(tmp_path: Path) -> None:
    data = "dstrain/recipes/demo-rm/eval.jsonl"
    (tmp_path / data).parent.mkdir(parents=True)
    shutil.copy(ROOT / data, tmp_path / data)
    train, evaluate, export = DEMO
    output = run(train, tmp_path)
    assert "held-out: eval at step 150/150" in output
    found = re.search(r"accuracy +([\d.]+)", run(evaluate, tmp_path))
    assert found is not None
    assert float(found[1]) > 0.75, "README shows 0.815"
    run(export, tmp_path)
    assert AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "rm-demo")).config.num_labels == 1
