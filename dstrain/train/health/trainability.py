"""Whether what should learn does: looked at once, after the first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from dstrain.batch import StepResult
from dstrain.errors import RunError
from dstrain.train.engine.deepspeed import Engine
from dstrain.train.engine.module import Objective
from dstrain.train.state.layout import Part
from dstrain.train.state.load import some

STEPS = 3
"""Steps taken before the look: LoRA's first matrices move only from the second on, as the others begin at zero."""
CHUNK = 1 << 22
"""Values that are summed at a time."""


class Learning:
    """Names the parameters that should learn and got no gradient or did not move; an error where none moved."""

    def __init__(self, engine: Engine, objective: Objective, tell: Callable[..., None]) -> None:
        self._engine, self._objective, self._tell = engine, objective, tell
        self._reached: set[str] = set()
        self._hooks: list[Any] = []
        self._names: list[str] = []
        self._before: dict[tuple[str, int], tuple[int, float]] = {}
        self._left = STEPS

    def begin(self) -> None:
        """Note where the weights are. Call after a load. Collective where they lie on a disk."""
        for name, parameter in self._objective.model.named_parameters():
            if name in self._objective.trainable:
                self._names.append(name)
                self._hooks.append(parameter.register_hook(self._noting(name)))
        self._before = dict(_sums(self._engine.parts()))

    def watch(self, result: StepResult, lr: float) -> None:
        """Take notice of a step; the look is taken once. Raises RunError on every rank alike. Collective then."""
        if not self._left or not result.applied or not lr:
            return
        self._left -= 1
        if not self._left:
            for hook in self._hooks:
                hook.remove()
            self._look(lr)

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._reached.add(name)

    def _look(self, lr: float) -> None:
        world = self._engine.world
        moved = {name for (name, start), found in _sums(self._engine.parts()) if found != self._before[name, start]}
        moved = set().union(*world.gather(moved))
        reached = set().union(*world.gather(self._reached))
        without = [name for name in self._names if name not in reached]
        still = [name for name in self._names if name in reached and name not in moved]
        if not moved:
            raise RunError(
                f"none of the {len(self._names)} parameters that should learn moved in the first {STEPS} steps (rate {lr:g}): "
                + ("none got a gradient; the task's loss must hang on the model's outputs"
                   if not reached else "raise optim.lr, or look at the task's loss")
            )  # fmt: skip
        if without or still:
            self._tell("not_learning", without_gradient=without, not_moved=still)
            if world.rank == 0:
                print("\n".join(self._sentences(without, still)), flush=True)

    def _sentences(self, without: Sequence[str], still: Sequence[str]) -> Iterator[str]:
        total = len(self._names)
        if without:
            yield (
                f"warning: {len(without)} of {total} parameters that should learn got no gradient in the first {STEPS} "
                f"steps: {some(without)}; the loss does not use them: put them into model.freeze, or fix the task"
            )
        if still:
            yield f"warning: {len(still)} of {total} did not move, their gradients were zero: {some(still)}"


def _sums(live: Iterable[Sequence[Part]]) -> Iterator[tuple[tuple[str, int], tuple[int, float]]]:
    """((parameter, first value), sums that change with any of its values) of the stretches that learn here."""
    for parts in live:
        for part in parts:
            if part.optimizer is None:
                continue
            flat = part.tensor.detach().view(-1)
            for place in part.places:
                bits, total = 0, 0.0
                for piece in flat.narrow(0, place.offset, place.numel).split(CHUNK):
                    words = piece.view(torch.int32 if piece.element_size() == 4 else torch.int16)
                    bits += int(words.sum(dtype=torch.int64))
                    total += float(piece.double().sum())
                yield (place.name, place.start), (bits, total)
