"""What a task is: it says what to sum.

A task is a frozen dataclass whose fields are its options. One file adds one:

    @dataclass(frozen=True, kw_only=True)
    class Halves(Task):
        weight: float = 1.0
        '''What the option does, with its unit. This string is its help text.'''

        def examples(self, split): ...       # any sequence of samples
        def collate(self, examples): ...     # samples -> Batch
        def build_model(self): ...           # -> torch module
        def loss(self, model, batch): ...    # -> Loss, a sum

Packaged tasks import torch inside methods, so that `dstrain tasks` answers on a login node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import TaskError

if TYPE_CHECKING:
    import torch

Split = Literal["train", "eval"]
ReferenceKind = Literal["none", "model", "adapter", "cached"]
"""No reference; a frozen copy beside the model; the model without its adapters; answers kept in a cache."""


@dataclass(frozen=True)
class Loss:
    """What one forward pass sums up."""

    total: torch.Tensor
    """Scalar, differentiable: the sum over the batch's units, not the mean."""
    metrics: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]] = field(default_factory=dict)
    """Name -> sum over the batch's units, or (sum, its own weight)."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What to learn, and from what."""

    metric_names: ClassVar[tuple[str, ...]] = ()
    """Names `loss` puts into its metrics, so that eval.metric can be checked before the run."""

    learning_rate: ClassVar[float] = 1.0e-5
    """Peak learning rate where the recipe names none (optim.lr) and all weights learn; with `model.lora` ten times this."""

    heads: ClassVar[tuple[str, ...]] = ()
    """Parts of the model that are new and learn as a whole where `model.lora` freezes the rest."""

    recipe: RunConfig = field(default_factory=RunConfig, repr=False)
    """The recipe the task was made for; no option."""

    @property
    def reference_kind(self) -> ReferenceKind:
        """Whom the loss compares the model with, and where that one's answers come from."""
        return "none"

    @property
    def needs_step_stats(self) -> bool:
        """Whether the losses of a step need means over all its samples, which `survey` sums up beforehand."""
        return False

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Any] | None:
        """Samples by index, or None where there is no held-out data.

        Runs on every process before any process group starts. Raises DataError for data that cannot be used.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> Batch:
        """One micro-batch on the host, its weight counted."""

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """The model, with its weights. Collective under ZeRO-3."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        """Sums over the batch. The forward pass must run the model once, on every rank."""

    @property
    def reference_config(self) -> ModelConfig:
        """What `build_reference` loads, for the key of kept answers."""
        return self.recipe.model

    def build_reference(self) -> torch.nn.Module:
        """The reference as a whole model. Collective under ZeRO-3."""
        raise TaskError(f"task {type(self).__name__}: names a reference; give it a method `build_reference(self)`")

    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """What the reference says of a batch: tensors with a row for each sample, which `loss` finds in the batch.

        Called without gradients, with the reference as `model`. Column names are the same for every batch.
        """
        raise TaskError(f"task {type(self).__name__}: names a reference; give it a method `refer(self, model, batch)`")

    def step_stats(
        self, model: torch.nn.Module, batch: Batch
    ) -> Mapping[str, torch.Tensor | tuple[torch.Tensor, float]]:
        """Name -> sum over the batch's units, or (sum, its own weight), of what `loss` must know of a whole step.

        Called without gradients for every batch of a step, or of an evaluation, before the first loss; `loss` finds in its
        batch, under the same names, the means over all batches of all ranks. One pass on every rank, as for a loss.
        """
        raise TaskError(f"task {type(self).__name__}: asks for a survey; give it a method `survey(self, model, batch)`")

    def check_required_keys(self) -> None:  # noqa: B027  a task of its own data needs none
        """Raise UsageError where the recipe does not name what the task needs: asked first, without torch."""

    def check(self) -> None:  # noqa: B027  most tasks of one file have nothing to check
        """Raise UsageError for what can be known wrong before any process group starts."""

    def warnings(self) -> Sequence[str]:
        """What is allowed and may surprise, a sentence each, said where a run starts."""
        return ()

    def info_messages(self) -> Sequence[str]:
        """What is worth knowing of a run and is as it should be, a sentence each, said where it starts."""
        return ()

    def baselines(self, examples: Sequence[Any]) -> Mapping[str, float]:
        """What a simple rule reaches on these examples, to see metrics against: name -> share or mean."""
        return {}

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """What an exported model must reproduce on a probe batch."""
        return self.loss(model, batch).total

    def exported_recipe(self, merged: bool) -> RunConfig:
        """The recipe beside an exported model, whose folder takes the place of model.path where it is whole.

        `merged`: the run had adapters, and they are part of the weights now.
        """
        return self.recipe

    def save_extras(self, folder: Path) -> None:  # noqa: B027  nor anything to write
        """Write what an exported model needs beside its weights (a tokenizer, a processor)."""

    def reload(self, folder: Path) -> torch.nn.Module:
        """The model in an exported folder: of a class of transformers as that class loads it, else built and filled anew."""
        from dstrain.models.weights.module_file import load_module

        model: Any = self.build_model()
        if hasattr(model, "save_pretrained"):
            return cast("torch.nn.Module", type(model).from_pretrained(str(folder)))
        load_module(model, folder)
        return cast("torch.nn.Module", model)

    @classmethod
    def tiny(cls, folder: Path) -> dict[str, Any]:
        """A recipe for tests, seconds long, with its data written into the folder."""
        raise TaskError(f"task {cls.__name__}: has no tiny recipe; give it a classmethod `tiny(cls, folder)`")
