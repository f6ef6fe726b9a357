"""Worker functions of the adapter tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dstrain.commands.export import export_model
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task

TEXT = "\n\nHuman: How do I mend the pump?\n\nAssistant: Gladly: open it."


def save_base(folder: str, recipe: dict[str, Any]) -> None:
    """Save a complete model with its tokenizer, or its processor, as on the Hub."""
    task: Any = make_task(RunConfig.model_validate(recipe | {"seed": 5}))
    task.build_model().save_pretrained(folder)
    processor = task.model_source.vision_processor
    (task.tokenizer if processor is None else processor.hf_processor).save_pretrained(folder)


def export(run: str, to: str, merge: bool) -> dict[str, Any]:
    """Export, then compute the logits of a text with transformers or peft only."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    proof = export_model(Path(run), "last", Path(to), merge_lora=merge)
    files = sorted(path.name for path in Path(to).iterdir())
    auto: Any = AutoModelForCausalLM if "config.json" in files else AutoPeftModelForCausalLM
    model, ids = (
        auto.from_pretrained(to).eval(),
        AutoTokenizer.from_pretrained(to)(TEXT, return_tensors="pt")["input_ids"],
    )
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return {"difference": proof.max_diff, "files": files, "logits": logits.double().numpy()}
