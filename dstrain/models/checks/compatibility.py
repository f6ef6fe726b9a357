"""Whether a model is what a task needs, by its config and by the names and shapes in its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import MAX_NAMES, DataError, Fault, RecipeError, first_names
from dstrain.models.adapters.load import check_adapter
from dstrain.models.checks.max_positions import check_positions, rope_length_warning
from dstrain.models.checks.preflight import bidirectional_fault
from dstrain.models.folder.adapter_config import Adapter, read_adapter
from dstrain.models.folder.model_types import is_bidirectional
from dstrain.models.params.freeze import freeze, trains_on_text
from dstrain.models.params.groups import check_freeze_and_groups
from dstrain.models.weights.init_weights import check_init
from dstrain.models.weights.load_report import (
    LoadReport,
    build_load_report,
    is_head_key,
    shape_fault,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class ModelValidator:
    """Whether a recipe's model, and what its files hold, is what a task needs; asked once, before anything starts."""

    recipe: RunConfig
    heads: Sequence[str]
    """Parts of the model that may be new."""
    can_generate: bool
    """Whether the model writes answers from left to right."""
    warnings: Sequence[str] = ()
    """Positions beyond those trained, weights drawn beside a new head, and weights of the model's body that are left out."""
    newly_initialized: Sequence[str] = ()
    """Parts of new heads that no file holds."""
    info_messages: Sequence[str] = ()
    """New heads."""

    def check(self, meta_model: PreTrainedModel) -> None:
        """Raise RecipeError where it is not; `bones` is a skeleton of the model."""
        config, adapter = meta_model.config, read_adapter(self._model.path)
        if self.can_generate and is_bidirectional(config.model_type, getattr(config, "is_decoder", None)):
            raise RecipeError(
                bidirectional_fault("model.path" if self._model.path else "model.config", config.model_type)
            )
        check_positions(meta_model, config, self.recipe.data.max_length)
        check_freeze_and_groups(meta_model, self.recipe)
        self._check_files(meta_model)
        if self._model.init is not None:
            check_init(meta_model, self._model.init)
        if adapter is not None:  # last: the skeleton is of no use afterwards
            check_adapter(meta_model, adapter)

    @property
    def _model(self) -> ModelConfig:
        return self.recipe.model

    def _check_files(self, meta_model: PreTrainedModel) -> None:
        report = build_load_report(meta_model, self._model) or LoadReport((), (), ())
        if faults := [shape_fault(one, self.heads) for one in report.mismatched[:MAX_NAMES]]:
            raise RecipeError(faults)
        old = [name for name in report.missing if not is_head_key(name, self.heads)]
        total = len({id(tensor) for tensor in meta_model.state_dict(keep_vars=True).values()})
        layers = [name for name in old if re.search(r"\.\d+\.", name)]
        if self._model.init is None and old and (not self.heads or layers or len(old) > total / 2):
            raise RecipeError(self._missing_weights_fault(meta_model, old))
        beyond = rope_length_warning(meta_model.config, self.recipe.data.max_length)
        self.warnings = [*filter(None, [beyond]), *self._iter_warnings(meta_model, report, old)]
        adapter = read_adapter(self._model.path)
        saved = () if adapter is None else adapter.modules_to_save
        if self._model.init is None:
            self.newly_initialized = [
                name for name in report.missing if is_head_key(name, self.heads) and not is_head_key(name, saved)
            ]
        self.info_messages = [*self._iter_info_messages(adapter)]

    def _iter_info_messages(self, adapter: Adapter | None) -> Iterator[str]:
        path = self._model.path
        if adapter is not None:
            yield f"{path} is a LoRA adapter of {adapter.base_model}: it is merged into these weights when they are loaded"
        if self.newly_initialized:
            yield f"new and drawn from seed {self.recipe.seed}: {first_names(self.newly_initialized)} (the files of {path} have no such head)"

    def _missing_weights_fault(self, meta_model: PreTrainedModel, missing: Sequence[str]) -> Fault:
        told = ", ".join(meta_model.config.architectures or ()) or "nothing of its class"
        problem = f"'{self._model.path}' lacks {first_names(missing)} of a {type(meta_model).__name__}, which would be drawn at random"
        return Fault("model.path", problem, f"name a model of this kind (its config.json says {told})")

    def _iter_warnings(self, meta_model: PreTrainedModel, report: LoadReport, missing: Sequence[str]) -> Iterator[str]:
        body, path = f"{meta_model.base_model_prefix}.", self._model.path
        left = [name for name in report.unexpected if not self.heads or name.startswith(body)]
        if missing and self._model.init is None:
            yield f"the files of {path} lack {first_names(missing)}: drawn from the seed"
        if left:
            yield f"the model has no place for {first_names(left)} in the files of {path}: left out"


def check_trains_on_text(meta_model: PreTrainedModel, model: ModelConfig) -> None:
    """Raise DataError where nothing learns from records without images. The skeleton's parts are frozen."""
    freeze(meta_model, model.freeze)
    if not trains_on_text(meta_model):
        problem = "no record shows an image, and model.freeze leaves nothing that learns from text"
        raise DataError(Fault("data.train", problem, "name records with images, or freeze less"))
