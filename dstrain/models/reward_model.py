"""Reward models: a base model with a score head, and how they are saved and loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import cached_file

from dstrain.errors import Fault, RecipeError, TaskError, UsageError, first_names
from dstrain.models.folder import ADAPTER_CONFIG, SCORE_HEAD_FILE, find_hub_code
from dstrain.models.params import assign, full_shape, gathered
from dstrain.models.weights import disable_transformers_logging

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Shapes: B rows, L tokens, H width.

SCORE_WEIGHT_KEY = "score.weight"
"""Key in SCORE_HEAD_FILE."""


class RewardModelMixin:
    """Mixin for a family's PreTrainedModel: its base model under `base_model_prefix`, and a score head.

    Unlike transformers' GenericForSequenceClassification, it reads the width from the text config in every version and
    scores one token per row. In files, the base model is one that every class of the family can load.
    """

    config: Any
    base_model_prefix: str

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the family's PreTrainedModel
        setattr(self, self.base_model_prefix, AutoModel.from_config(config))
        self.score = torch.nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        cast("Any", self).post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **vision_inputs: Any
    ) -> SequenceClassifierOutput:
        """Return `logits` (B, labels) of ids (B, L), read at each row's last token that is not the pad token.

        `vision_inputs`: further inputs of the base model, such as pixel values.
        """
        base = getattr(self, self.base_model_prefix)
        outputs = base(input_ids=input_ids, attention_mask=attention_mask, **vision_inputs)
        states = outputs.last_hidden_state  # (B, L, H)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        # argmax finds the last non-pad position, as positions grow to the right.
        last = (positions * (input_ids != self.config.get_text_config().pad_token_id)).argmax(-1)  # (B,)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        # The head sees one state per row: (B, H) -> (B, labels).
        return SequenceClassifierOutput(logits=self.score(states[rows, last]))

    def save_pretrained(self, save_directory: str | Path, **settings: Any) -> None:
        """Write the base model as transformers does, and the head into SCORE_HEAD_FILE."""
        base, head = split_score_head(cast("PreTrainedModel", self))
        base.save_pretrained(str(save_directory), **settings)
        with gathered([cast("torch.nn.Parameter", value) for value in head.values()]):
            tensors = {name: value.detach().cpu().contiguous() for name, value in head.items()}
            save_file(tensors, str(Path(save_directory) / SCORE_HEAD_FILE), metadata={"format": "pt"})


def split_score_head(model: PreTrainedModel) -> tuple[PreTrainedModel, Mapping[str, torch.Tensor]]:
    """Return (model whose state-dict keys the weight files have, tensors of the head file).

    The second is empty for any model but a RewardModelMixin.
    """
    if not isinstance(model, RewardModelMixin):
        return model, {}
    reward_model = cast("Any", model)
    return reward_model.base_model, {SCORE_WEIGHT_KEY: reward_model.score.weight}


def get_reward_model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a family's reward models: transformers' own, or its base model with RewardModelMixin.

    Scores are read at the last token that is not the text config's pad token. Raises RecipeError where the family has
    no causal base model.
    """
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        return known[0] if isinstance(known, tuple) else known
    base = MODEL_MAPPING.get(type(config), None)
    if base is None or config.is_encoder_decoder or not _is_causal_decoder(base):
        problem = (
            f"transformers has no reward model of the {config.model_type} family, and no causal base model to build one"
        )
        raise RecipeError(Fault("model", problem, "use a model of another family"))
    return _create_class(cast("Any", type(config)), base)


@cache
def _create_class(config_class: type[PretrainedConfig], base_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    family = next(one for one in base_class.__mro__ if one.__name__.endswith("PreTrainedModel"))
    name = f"{base_class.__name__.removesuffix('Model')}ForSequenceClassification"
    _register_key_mapping(name, config_class)
    # __module__ is the family's: transformers does not rename weights of classes that it takes for custom code.
    attributes = {"__module__": base_class.__module__, "base_model_prefix": base_class.base_model_prefix or "model"}
    return cast("type[PreTrainedModel]", type(name, (RewardModelMixin, family), attributes))


def _is_causal_decoder(base_class: type[PreTrainedModel]) -> bool:
    """Return True where `forward` takes ids first and returns a hidden state per token."""
    signature = inspect.signature(base_class.forward)
    annotation = signature.return_annotation
    outputs = [one for one in (annotation, *get_args(annotation)) if dataclasses.is_dataclass(one)]
    states = any(field.name == "last_hidden_state" for one in outputs for field in dataclasses.fields(one))
    return [*signature.parameters][1] == "input_ids" and states


def _register_key_mapping(class_name: str, config_class: type[PretrainedConfig]) -> None:
    """Register the key renaming of the family's image-text-to-text class for a new class name.

    transformers looks up how to rename keys of old checkpoints by the class's name.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    if config_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        generator = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class].__name__
        if (mapping := get_checkpoint_conversion_mapping(generator)) is not None:
            register_checkpoint_conversion_mapping(class_name, mapping, overwrite=True)


class AutoRewardModel:
    """Auto class of reward models, like transformers' Auto classes. A missing head is initialized."""

    @staticmethod
    def from_pretrained(name: str, *, config: PretrainedConfig | None = None, **settings: Any) -> PreTrainedModel:
        """Load a generative model or an exported reward model from a folder or the Hub. Collective under ZeRO-3."""
        trust, revision = settings.get("trust_remote_code", False), settings.get("revision")
        config = config or AutoConfig.from_pretrained(name, trust_remote_code=trust, revision=revision)
        auto: Any = (
            AutoModelForSequenceClassification if has_classification_class(config) else get_reward_model_class(config)
        )
        head = _find_score_head(name, revision) if issubclass(auto, RewardModelMixin) else None
        # Before the model is built: its constructor may draw numbers (see _init_score_head).
        start = torch.get_rng_state()
        with disable_transformers_logging(warnings=head is not None):  # else it warns of the missing head
            model, info = auto.from_pretrained(name, config=config, output_loading_info=True, **settings)
        if head is not None:
            _load_score_head(model, head, info["missing_keys"])
        elif SCORE_WEIGHT_KEY in info["missing_keys"]:
            _init_score_head(model, start)
        return model

    @staticmethod
    def from_config(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
        """Build a model with newly initialized weights."""
        if has_classification_class(config):
            return AutoModelForSequenceClassification.from_config(config, **settings)
        settings.pop("trust_remote_code", None)
        return cast("Any", get_reward_model_class(config))._from_config(config, **settings)


def has_classification_class(config: PretrainedConfig) -> bool:
    """Return True where transformers, or code that comes with the model, has a sequence-classification class."""
    auto_map = getattr(config, "auto_map", None) or {}
    return (
        type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        or AutoModelForSequenceClassification.__name__ in auto_map
    )


def has_separate_score(config: PretrainedConfig) -> bool:
    """Return True where a reward model of this config is its base model with the head `score` on the last state."""
    from transformers.modeling_layers import GenericForSequenceClassification

    model_class = get_reward_model_class(config)
    return issubclass(model_class, RewardModelMixin | GenericForSequenceClassification)


def _find_score_head(name: str, revision: str | None) -> str | None:
    """Return the path of a head file in a folder or on the Hub, None where there is none."""
    return cached_file(
        name,
        SCORE_HEAD_FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _init_score_head(model: Any, rng_state: torch.Tensor) -> None:
    """Initialize the head from the random state `rng_state`. Collective under ZeRO-3.

    Constructors of vision towers draw random numbers too (CLIP's class embedding), but not where transformers builds
    them on the meta device. Restoring the state makes the head the same at every ZeRO stage.
    """
    outputs, inputs = full_shape(model.score.weight)
    torch.set_rng_state(rng_state)
    # On the CPU in fp32: the same draws for any device, dtype and stage.
    head = torch.nn.Linear(inputs, outputs, bias=False, device="cpu", dtype=torch.float32)
    model._init_weights(head)  # the family's own initialization
    assign(model.score.weight, lambda: head.weight)


def _load_score_head(model: Any, file: str, missing_keys: Collection[str]) -> None:
    """Load the head from its file. Raises RecipeError for missing keys or another shape. Collective under ZeRO-3."""
    stored, weight = load_file(file), model.score.weight
    if missing := sorted({*missing_keys} - {SCORE_WEIGHT_KEY}):
        raise RecipeError(f"{Path(file).parent}: missing keys: {first_names(missing)}; export it again")
    if stored.keys() != {SCORE_WEIGHT_KEY} or tuple(stored[SCORE_WEIGHT_KEY].shape) != full_shape(weight):
        shapes = {name: tuple(value.shape) for name, value in stored.items()}
        raise RecipeError(f"{file}: holds {shapes}, and the model's head is {full_shape(weight)}; export it again")
    assign(weight, lambda: stored[SCORE_WEIGHT_KEY])


def load_reward_model(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the reward model of a folder that `dstrain export` wrote, in evaluation mode.

    Call it with the outputs of its tokenizer or processor (input_ids, attention_mask, pixel_values, ...): `logits` of its
    output, shape (B, 1) for B rows, are the scores, read at the last token that is not padding. `dtype` of the weights:
    None for that of the export. Raises UsageError for a folder without a reward model.
    """
    place = Path(folder).expanduser()
    if (place / ADAPTER_CONFIG).is_file():
        raise UsageError(f"{folder}: holds only adapters; export the run with --merge-lora to write a complete model")
    if not (place / "config.json").is_file():
        raise UsageError(f"{folder}: holds no model (config.json); give a folder that `dstrain export` wrote")
    config = AutoConfig.from_pretrained(str(place))
    if found := find_hub_code(config):
        raise UsageError(f"{folder}: in its config {found}; remove the key from config.json")
    names = config.architectures or ["model of an unknown architecture"]
    if not (place / SCORE_HEAD_FILE).is_file() and not names[0].endswith("ForSequenceClassification"):
        raise TaskError(f"{folder}: holds a {names[0]}, which gives no score; give the export of a reward model")
    settings = {} if dtype is None else {"dtype": dtype}
    try:
        return AutoRewardModel.from_pretrained(str(place), config=config, **settings).eval()
    except OSError as error:  # missing weight files
        raise UsageError(f"{folder}: cannot be loaded ({str(error).splitlines()[0]}); export it again") from error
