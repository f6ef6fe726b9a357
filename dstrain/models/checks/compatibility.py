"""Whether a model is what a task needs, by its config and by the names and shapes in its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import DataError, Fault, RecipeError
from dstrain.models.adapters.folder import Adapter, check_adapter, read_adapter
from dstrain.models.checks.config_json import attends_both_ways
from dstrain.models.checks.max_positions import beyond_training, check_positions
from dstrain.models.checks.preflight import both_ways
from dstrain.models.params.freeze import check_parts, freeze, learns_from_text
from dstrain.models.weights.check_keys import NAMES, LoadReport, is_head, load_report, some, wrong_shape
from dstrain.models.weights.init_weights import check_init

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Fit:
    """Whether a recipe's model, and what its files hold, is what a task needs; asked once, before anything starts."""

    recipe: RunConfig
    heads: Sequence[str]
    """Parts of the model that may be new."""
    writes: bool
    """Whether the model writes answers from left to right."""
    surprises: Sequence[str] = ()
    """Positions beyond those trained, weights drawn beside a new head, and weights of the model's body that are left out."""
    drawn: Sequence[str] = ()
    """Parts of new heads that no file holds."""
    notices: Sequence[str] = ()
    """New heads."""

    def check(self, bones: PreTrainedModel) -> None:
        """Raise RecipeError where it is not; `bones` is a skeleton of the model."""
        config, adapter = bones.config, read_adapter(self._model.path)
        if self.writes and attends_both_ways(config.model_type, getattr(config, "is_decoder", None)):
            raise RecipeError(both_ways("model.path" if self._model.path else "model.config", config.model_type))
        check_positions(bones, config, self.recipe.data.max_length)
        check_parts(bones, self.recipe)
        self._check_files(bones)
        if self._model.init is not None:
            check_init(bones, self._model.init)
        if adapter is not None:  # last: the skeleton is of no use afterwards
            check_adapter(bones, adapter)

    @property
    def _model(self) -> ModelConfig:
        return self.recipe.model

    def _check_files(self, bones: PreTrainedModel) -> None:
        report = load_report(bones, self._model) or LoadReport((), (), ())
        if faults := [wrong_shape(one, self.heads) for one in report.mismatched[:NAMES]]:
            raise RecipeError(faults)
        old = [name for name in report.missing if not is_head(name, self.heads)]
        total = len({id(tensor) for tensor in bones.state_dict(keep_vars=True).values()})
        layers = [name for name in old if re.search(r"\.\d+\.", name)]
        if self._model.init is None and old and (not self.heads or layers or len(old) > total / 2):
            raise RecipeError(self._lacks(bones, old))
        beyond = beyond_training(bones.config, self.recipe.data.max_length)
        self.surprises = [*filter(None, [beyond]), *self._surprises(bones, report, old)]
        adapter = read_adapter(self._model.path)
        saved = () if adapter is None else adapter.saved
        if self._model.init is None:
            self.drawn = [name for name in report.missing if is_head(name, self.heads) and not is_head(name, saved)]
        self.notices = [*self._notices(adapter)]

    def _notices(self, adapter: Adapter | None) -> Iterator[str]:
        path = self._model.path
        if adapter is not None:
            yield f"{path} is a LoRA adapter of {adapter.base}: it is merged into these weights when they are loaded"
        if self.drawn:
            yield f"new and drawn from seed {self.recipe.seed}: {some(self.drawn)} (the files of {path} have no such head)"

    def _lacks(self, bones: PreTrainedModel, old: Sequence[str]) -> Fault:
        told = ", ".join(bones.config.architectures or ()) or "nothing of its class"
        problem = f"'{self._model.path}' lacks {some(old)} of a {type(bones).__name__}, which would be drawn at random"
        return Fault("model.path", problem, f"name a model of this kind (its config.json says {told})")

    def _surprises(self, bones: PreTrainedModel, report: LoadReport, old: Sequence[str]) -> Iterator[str]:
        body, path = f"{bones.base_model_prefix}.", self._model.path
        left = [name for name in report.unexpected if not self.heads or name.startswith(body)]
        if old and self._model.init is None:
            yield f"the files of {path} lack {some(old)}: drawn from the seed"
        if left:
            yield f"the model has no place for {some(left)} in the files of {path}: left out"


def check_text_teaches(bones: PreTrainedModel, model: ModelConfig) -> None:
    """Raise DataError where nothing learns from records without images. The skeleton's parts are frozen."""
    freeze(bones, model.freeze)
    if not learns_from_text(bones):
        problem = "no record shows an image, and model.freeze leaves nothing that learns from text"
        raise DataError(Fault("data.train", problem, "name records with images, or freeze less"))
