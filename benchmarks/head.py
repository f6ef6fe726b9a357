"""Measure time and memory of the output head: all logits at once, in chunks by autograd, and as a linear head.

    python -m benchmarks.head [--vocabulary 128256] [--length 4096]

"linear" computes its gradient by hand; it is what a run uses, unless the head has adapters or a forward pass of its own.

Memory is that of a forward and a backward pass in addition to the weights (`benchmarks.checkpointing`).
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.checkpointing import measure_peaks, memory_columns
from benchmarks.common import join_alone, ratio, run, take_turns
from dstrain.batch import Batch
from dstrain.models import heads
from dstrain.models.heads import LinearHead
from dstrain.tasks.common.forward import answer_log_probs


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


VARIANTS = ("all logits", "chunks", "linear")


def passes(model: torch.nn.Module, batch: Any, variant: str) -> torch.Tensor:
    """Return the loss, (), and leave its gradient in the model."""
    heads._IN_PLACE_MODELS.clear()
    if variant == "all logits":
        heads._IN_PLACE_MODELS.add(model)
    model.zero_grad(set_to_none=True)
    supports = LinearHead.supports if variant == "linear" else lambda *_: False
    with mock.patch.object(LinearHead, "supports", supports):
        loss = -answer_log_probs(model, batch).sum()
        loss.backward()
    return loss.detach()


def measure(
    *, vocabulary: int = 32768, hidden: int = 64, length: int = 1536, micro: int = 4, precision: str = "fp32", rounds: int = 5
) -> dict[str, Any]:  # fmt: skip
    """Check that losses and gradients are equal, then measure memory and time."""
    device = join_alone().device
    model = made_llama(vocabulary, hidden, device, torch.float32 if precision == "fp32" else torch.bfloat16)
    batch = answers(vocabulary, micro, length, length).to(device)
    found, gradients = {}, {}
    for name in VARIANTS:
        found[name] = float(passes(model, batch, name))
        gradients[name] = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    base = gradients["all logits"]
    off = max(abs(loss / found["all logits"] - 1) for loss in found.values())
    apart = max(float((gradient - base).norm() / base.norm()) for gradient in gradients.values())
    limit = 1e-6 if precision == "fp32" else 2e-2
    assert max(off, apart) <= limit, f"chunks change the loss by {off:.1e} and the gradient by {apart:.1e}"
    del gradients, base
    runners = {name: (lambda _turn, name=name: passes(model, batch, name)) for name in VARIANTS}
    memory = measure_peaks(runners, device, prepare=lambda: model.zero_grad(set_to_none=True))
    seconds = take_turns(runners, rounds, 1, device)
    rows = [
        {"head": name, **ratio(seconds, name, "all logits"), **memory_columns(memory, name, "all logits", "memory_mib")}
        for name in VARIANTS
    ]
    return {
        "settings": {"vocabulary": vocabulary, "hidden": hidden, "length": length, "micro": micro,
                     "precision": precision, "rounds": rounds},
        "checked": f"loss and gradient differ by {off:.1e} and {apart:.1e} (limit {limit:g})",
        "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    run(measure, __doc__ or "")
