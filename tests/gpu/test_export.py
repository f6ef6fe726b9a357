"""What leaves a run that was trained on a GPU: its export proves its answers, and plain transformers gives them on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstrain.commands.export import export_model
from tests.gpu.test_tasks import train
from tests.gpu.workers import REHEARSAL, GpuWorkers
from tests.workers import ROOT

pytestmark = pytest.mark.gpu

PROMPT = "\n\nHuman: How do I mend the pump?\n\nAssistant:"
NEW_TOKENS = 16


@pytest.mark.parametrize("case", ["sft", "sft, adapters", "vlm"])
def test_an_exported_folder_answers_on_a_gpu_as_generate_does(case: str, gpus: GpuWorkers, tmp_path: Path) -> None:
    train(gpus, case, tmp_path, "zero2", "bf16")
    export_model(tmp_path / "zero2", "last", tmp_path / "out", merge_lora="adapters" in case)  # compares greedy answers
    if case == "vlm":
        return
    arguments = [
        "generate",
        str(tmp_path / "zero2"),
        "--step",
        "last",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        str(NEW_TOKENS),
    ]
    command = [sys.executable, "-P", "-m", "dstrain.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True)
    here = json.loads(done.stdout.strip().splitlines()[-1])["answer"]
    assert answer_elsewhere(tmp_path / "out") == here


def answer_elsewhere(folder: Path) -> str:
    """Return the answer of transformers alone, on the GPU where there is one, with nothing but what the folder says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder)).eval().to("cpu" if REHEARSAL else "cuda")
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    written = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
