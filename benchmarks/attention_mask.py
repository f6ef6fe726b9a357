"""Measure the cost of an attention mask for rows that are padded on the right.

python -m benchmarks.attention_mask [--length 1024]
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import join_alone, ratio, run, take_turns
from dstrain.batch import Batch
from dstrain.tasks.common import forward
from dstrain.tasks.common.forward import score_targets


def made_llama(vocabulary: int, hidden: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(device, dtype)


def answers(vocabulary: int, micro: int, length: int, shortest: int) -> Batch:
    """Return rows of `shortest` to `length` tokens; all but the first token are trained on."""
    ids = torch.randint(3, vocabulary, (micro, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(shortest, length, micro).long()
    mask = (torch.arange(length) < lengths[:, None]).long()
    loss_mask = mask[:, 1:].contiguous()
    tensors = {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask}
    return Batch(tensors=tensors, weight=float(loss_mask.sum()), samples=())


def passes(model: torch.nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the loss, (), and leave its gradient in the model."""
    model.zero_grad(set_to_none=True)
    with mock.patch.object(forward, "NO_MASK_MODEL_TYPES", frozenset() if masked else forward.NO_MASK_MODEL_TYPES):
        loss = -score_targets(model, batch)[0].sum()
    loss.backward()
    return loss.detach()


def measure(*, hidden: int = 256, length: int = 1024, micro: int = 4, rounds: int = 8) -> dict[str, Any]:
    """Check that the losses are equal, then time both in turns."""
    device = join_alone().device
    model, batch = made_llama(512, hidden, device), answers(512, micro, length, length // 2).to(device)
    variants = {"a mask": True, "no mask": False}
    found = {name: float(passes(model, batch, masked)) for name, masked in variants.items()}
    off = abs(found["no mask"] / found["a mask"] - 1)
    assert off <= (0 if device.type == "cpu" else 1e-6), f"without a mask the loss differs by {off:.1e}"
    runners = {name: (lambda _turn, masked=masked: passes(model, batch, masked)) for name, masked in variants.items()}
    seconds = take_turns(runners, rounds, 1, device)
    return {
        "settings": {"hidden": hidden, "length": length, "micro": micro, "rounds": rounds},
        "checked": f"the losses differ by {off:.1e}",
        "rows": [{"attention": name, **ratio(seconds, name, "a mask")} for name in variants],
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
