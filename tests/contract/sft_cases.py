"""Worker functions of the sft tests: a trained model, evaluated with transformers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dstrain.commands.export import export_model


def export(run: str, to: str, data: str) -> dict[str, Any]:
    """Export, then return transformers' loss and accuracy on the answers of a file of messages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    proof = export_model(Path(run), "last", Path(to))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(to).eval(), AutoTokenizer.from_pretrained(to)
    loss = right = count = 0.0
    for line in Path(data).read_text().splitlines():
        ids, loss_mask = (torch.tensor([part]) for part in _encode(tokenizer, json.loads(line)["messages"]))
        labels = ids.masked_fill(loss_mask == 0, -100)
        with torch.no_grad():
            found = model(input_ids=ids, labels=labels)
        count += int(loss_mask.sum())
        loss += float(found.loss) * int(loss_mask.sum())
        right += int((found.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
    return {"difference": proof.max_diff, "loss": loss / count, "token_accuracy": right / count,
            "files": sorted(path.name for path in Path(to).iterdir())}  # fmt: skip


def _encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return ids and loss mask by transformers, or turn by turn if there is no template."""
    if tokenizer.chat_template:
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], found["assistant_masks"]
    ids: list[int] = []
    loss_mask: list[int] = []
    for message in messages:
        name = {"user": "Human", "assistant": "Assistant"}[message["role"]]
        for text, on in ((f"\n\n{name}:", 0), (f" {message['content']}", int(name == "Assistant"))):
            tokens = tokenizer(text)["input_ids"]
            ids, loss_mask = ids + tokens, loss_mask + [on] * len(tokens)
    return [*ids, tokenizer.eos_token_id], [*loss_mask, 1]
