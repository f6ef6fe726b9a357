"""What tasks share whose policy is held near a reference: who that is, and what it said before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.models.folder.location import check_local_folder
from dstrain.tasks.common.task import ReferenceKind
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ReferenceTask(TextTask):
    """A task that compares how likely answers are under the policy and under a reference."""

    learning_rate = 1.0e-6

    ref_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of `refer`."""

    beta: float = 0.1
    """How strongly the policy is held near its reference."""
    precompute_ref_log_probs: bool = False
    """Ask the reference once, before training, and keep its answers: no second model in memory."""
    ref_model: str | None = None
    """Folder or hub id of another reference; empty: the policy as it starts."""
    disable_dropout: bool = True
    """Train without dropout, so that policy and reference are compared as they are."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta:g}, but it must be above 0")

    def check_required_keys(self) -> None:
        super().check_required_keys()
        self.check_reference()

    def check_reference(self) -> None:
        """Raise RecipeError where the folder of another reference is not there."""
        if self.ref_model:
            check_local_folder(self.ref_model, "options.ref_model")

    @property
    def reference_kind(self) -> ReferenceKind:
        if self.precompute_ref_log_probs:
            return "cached"
        return "adapter" if self.recipe.model.lora is not None and self.ref_model is None else "model"

    @property
    def reference_config(self) -> ModelConfig:
        """What the reference is loaded from."""
        own = {"path": self.ref_model, "config": None, "init": None} if self.ref_model else {}
        return self.recipe.model.model_copy(update={**own, "lora": None})

    def build_reference(self) -> torch.nn.Module:
        from dstrain.models.weights.init_weights import load_init

        wanted = self.reference_config
        model = self.load(wanted)
        if wanted.init is not None:
            load_init(model, wanted.init)
        return model

    def cached_reference_outputs(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """(B,) each: what the reference said of the samples before training; nothing where it was not asked then."""
        import torch

        return {
            name: torch.tensor([example[name] for example in examples], dtype=torch.float64)
            for name in self.ref_columns
            if name in examples[0]
        }

    def exported_recipe(self, merged: bool) -> RunConfig:
        """What the policy was compared with stays its reference, where a folder or the hub has it."""
        model = self.recipe.model
        if self.reference_kind == "none" or self.ref_model or (model.lora is not None and not merged):
            return self.recipe
        if model.path is None or model.init is not None:
            return self.recipe
        return self.recipe.model_copy(update={"options": {**self.recipe.options, "ref_model": model.path}})

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        from dstrain.tasks.common.losses import answer_log_probs

        return answer_log_probs(model, batch)
