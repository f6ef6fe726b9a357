"""The model of task temporal: an encoder alone, or one joined to the language model of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.data.series.options import EncoderOptions
from dstrain.data.series.patches import PatchConfig
from dstrain.models.load import read_config
from dstrain.tasks.common.model_source import ModelSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LANGUAGE_STAGES = ("align", "sft")
"""Stages with a language model."""


@dataclass(frozen=True, kw_only=True)
class TemporalModelSource(ModelSource):
    """A temporal model: `model` of the recipe names a language model, or an exported temporal model."""

    stage: str = "align"
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    get_labels: Callable[[], Sequence[str]] | None = None
    """Returns the labels of stage classify."""

    @property
    def has_language_model(self) -> bool:
        """True where the model reads and writes text."""
        return self.stage in LANGUAGE_STAGES

    @property
    def reads_text(self) -> bool:
        return self.has_language_model

    @property
    def is_named(self) -> bool:
        return not self.has_language_model or super().is_named

    @property
    def can_generate(self) -> bool:
        return self.has_language_model

    @property
    def is_multimodal(self) -> bool:
        return False

    @property
    def has_encoder(self) -> bool:
        """True where model.path is an exported temporal model."""
        from dstrain.models.folder.adapter_config import resolve_base_model
        from dstrain.models.folder.model_types import is_temporal_folder

        return is_temporal_folder(resolve_base_model(self.recipe.model).path)

    @property
    def wraps_language_model(self) -> bool:
        """True where model.path is a language model, around which a temporal model is built."""
        return self.has_language_model and self.recipe.model.path is not None and not self.has_encoder

    @property
    def language_source(self) -> ModelSource:
        """The language model without an encoder."""
        return ModelSource(recipe=self.recipe, records=self.records, get_tokenizer=lambda: self.tokenizer)

    @cached_property
    def config(self) -> PretrainedConfig:
        return self._read_config(self.recipe.model)

    def _read_config(self, model: ModelConfig) -> PretrainedConfig:
        """Return a `TemporalConfig` with the sizes of a saved encoder, or of the options. Raises RecipeError."""
        from dstrain.models.temporal.config import TemporalConfig  # also registers the type with transformers

        own = self.encoder.config_values()
        if not self.has_language_model:
            config = read_config(model) if self.has_encoder else TemporalConfig(**own)
            config.text_config = None
        else:
            config = read_config(model)
            if not isinstance(config, TemporalConfig):
                config = TemporalConfig(text_config=config, **own)
        if self.get_labels is not None:
            labels = self.get_labels()
            config.id2label = dict(enumerate(labels))
            config.label2id = {label: index for index, label in enumerate(labels)}
        return config

    @cached_property
    def saved_labels(self) -> tuple[str, ...]:
        """The labels of an exported classifier; empty where model.path is none."""
        if not self.has_encoder:
            return ()
        import dstrain.models.temporal.config  # noqa: F401  # registers the type

        config: Any = read_config(self.recipe.model)
        if "TemporalForClassification" not in (config.architectures or ()):
            return ()
        return tuple(config.id2label[index] for index in sorted(config.id2label))

    @cached_property
    def patches(self) -> PatchConfig:
        """How series are cut into patches."""
        if not self.has_encoder:
            return self.encoder.patches  # without transformers
        config: Any = self.config
        return PatchConfig(config.patch_length, config.patches_per_token)

    @property
    def auto_class(self) -> Any:
        from dstrain.models.temporal.load import AutoTemporalModel

        return AutoTemporalModel(self.stage)

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        config: Any = self._read_config(model)
        if model.config is not None and self.has_language_model:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config.text_config, name, getattr(self.tokenizer, name))
        if self.has_language_model:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(config.text_config, name, None))
        return config

    @cached_property
    def tokenizer(self) -> Any:
        """The language model's tokenizer; None for an encoder alone."""
        return super().tokenizer if self.has_language_model else None

    @cached_property
    def recipe_tokenizer(self) -> Any:
        return super().recipe_tokenizer if self.has_language_model else None

    @cached_property
    def vision_processor(self) -> None:
        return None
