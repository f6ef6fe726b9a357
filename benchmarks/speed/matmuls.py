"""The matrix products that a step cannot do without: of the linear layers, each token once, and of the head on targets."""

# Shapes: T tokens of a step, N targets, H hidden size, I intermediate size, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from benchmarks.speed.settings import Setting


@dataclass(frozen=True)
class Work:
    """Tokens of a step: each counted once, also where both answers of a pair share it, and those that are targets."""

    tokens: int
    targets: int


def count_work(task: str, examples: Sequence[Mapping[str, Any]]) -> Work:
    """Return the work of one step on these samples. A reward model has no targets."""
    if task in ("sft", "vlm"):
        return Work(
            sum(len(example["input_ids"]) for example in examples),
            sum(int(example["loss_mask"].sum()) for example in examples),
        )
    tokens = targets = 0
    for example in examples:
        chosen, rejected = example["chosen"].tolist(), example["rejected"].tolist()
        pairs = zip(chosen, rejected, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        tokens += len(chosen) + len(rejected) - shared
        targets += len(chosen) + len(rejected) - 2 * int(example["prompt_length"]) if task != "rm" else 0
    return Work(tokens, targets)


class MatrixProducts:
    """Runs the products of the linear layers of a step, forward and backward. Attention and all else is left out."""

    def __init__(
        self, setting: Setting, works: Sequence[Work], dtype: torch.dtype, reference_passes: int, device: torch.device
    ) -> None:
        """`reference_passes`: forward passes of a frozen model in each step."""
        hidden, inner = setting.hidden, setting.intermediate
        shapes = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]  # (out, in)
        draw = torch.Generator().manual_seed(0)
        self._weights = [
            torch.randn(shape, generator=draw).to(device, dtype) for _ in range(setting.layers) for shape in shapes
        ]
        self._head = torch.randn(setting.vocabulary, hidden, generator=draw).to(device, dtype)
        most = max(max(work.tokens, work.targets) for work in works)
        self._rows = {
            width: torch.randn(most, width, generator=draw).to(device, dtype)
            for width in {hidden, inner, *([setting.vocabulary] if any(work.targets for work in works) else [])}
        }
        self._works, self._references = works, reference_passes

    def __call__(self, turn: int = 0) -> None:
        """Run the products of one step."""
        work = self._works[turn % len(self._works)]
        for weight, rows in [*((weight, work.tokens) for weight in self._weights), (self._head, work.targets)]:
            if not rows:
                continue
            inputs, gradients = self._rows[weight.shape[1]][:rows], self._rows[weight.shape[0]][:rows]
            for _ in range(1 + self._references):
                torch.nn.functional.linear(inputs, weight)  # (rows, in) -> (rows, out)
            gradients @ weight  # of the inputs
            gradients.T @ inputs  # of the weight
