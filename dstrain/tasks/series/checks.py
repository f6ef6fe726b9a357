"""Checks and export of task temporal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import RunConfig
from dstrain.data.cache.dataset import NO_TRAIN_DATA
from dstrain.errors import Fault, RecipeError
from dstrain.models.checks.compatibility import ModelValidator
from dstrain.models.checks.preflight import check_model
from dstrain.models.load import MISSING_MODEL, check_vocab_size
from dstrain.models.params.groups import check_freeze_and_groups
from dstrain.models.weights.check_files import check_weight_files
from dstrain.tasks.common.text import TextChecks
from dstrain.tasks.sft import SFTExport

if TYPE_CHECKING:
    import torch

    from dstrain.batch import Batch


@dataclass(frozen=True, kw_only=True)
class TemporalChecks(TextChecks):
    """The checks of a text task for the language model, and of the encoder's settings."""

    task: Any
    """A `Temporal`, which imports this module."""

    def required_keys(self) -> None:
        recipe, source = self.task.recipe, self.task.model_source
        faults = [MISSING_MODEL] * (not source.is_named)
        faults += [NO_TRAIN_DATA] * (not self.task.training_items)
        if source.is_named and not source.has_encoder and not faults:
            faults += check_model(recipe)
        if not source.has_language_model and recipe.model.path is not None and not source.has_encoder:
            problem = f"is not an exported temporal model, and stage {self.task.stage} has no language model"
            faults.append(Fault("model.path", problem, "give an export of task temporal, or leave it out"))
        if faults:
            raise RecipeError(faults)

    def run(self) -> None:
        recipe, source = self.task.recipe, self.task.model_source
        self._check_encoder(source)
        check_weight_files(recipe.model)
        if source.has_language_model:
            check_vocab_size(recipe.model, source.config, len(self.task.tokenizer), False)
        meta_model = source.build_meta_model()
        if source.wraps_language_model:
            check_freeze_and_groups(meta_model, recipe)
            meta_model = source.language_source.build_meta_model()
        self.validator.check(meta_model)

    def _check_encoder(self, source: Any) -> None:
        given = self.task.recipe.options.get("encoder", {})
        if source.has_encoder and (names := self.task.encoder.find_mismatched(source.config, given)):
            problem = f"differs from the encoder in {self.task.recipe.model.path} ({', '.join(names)})"
            raise RecipeError(Fault("options.encoder", problem, "remove it: a saved encoder keeps its sizes"))

    def info_messages(self) -> Sequence[str]:
        return super().info_messages() if self.task.has_language_model else self.validator.info_messages

    @cached_property
    def validator(self) -> ModelValidator:
        task, recipe = self.task, self.task.recipe
        if task.model_source.wraps_language_model:  # whose parts the patterns of the recipe may not name
            model = recipe.model.model_copy(update={"freeze": [], "lora": None, "init": None})
            optim = recipe.optim.model_copy(update={"groups": {}})
            recipe = recipe.model_copy(update={"model": model, "optim": optim})
        heads = task.modules_to_save if task.stage == "classify" else ("reconstruction", "mask_embedding")
        return ModelValidator(recipe, heads if not task.has_language_model else (), task.has_language_model)


@dataclass(frozen=True)
class TemporalExport(SFTExport):
    """Exports a folder that `dstrain.models.temporal` loads; the labels of a classifier are in its config."""

    task: Any
    """A `Temporal`, which imports this module."""

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if self.task.has_language_model:
            return super().outputs(model, batch)
        return self.task.loss(model, batch).total

    def recipe(self, merged: bool) -> RunConfig:
        recipe = super().recipe(merged)
        if self.task.stage != "classify":
            return recipe
        options: dict[str, Any] = {**recipe.options, "labels": list(self.task.known_labels)}
        return recipe.model_copy(update={"options": options})
