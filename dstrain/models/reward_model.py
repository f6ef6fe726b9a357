"""Reward models of every family: the base model and a head that reads its last token; how they are saved and loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from transformers.utils import cached_file, logging

from dstrain.errors import Fault, RecipeError, TaskError, UsageError, first_names
from dstrain.models.folder.adapter_config import read_adapter
from dstrain.models.folder.hub_code import find_hub_code
from dstrain.models.params.zero3 import assign, full_shape, gathered

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SCORE_HEAD_FILE = "score.safetensors"
"""Lies beside a base model's files and holds WEIGHT."""
SCORE_WEIGHT_KEY = "score.weight"


def has_score_head(config: PretrainedConfig, path: str | None) -> bool:
    """Whether a model was trained to give scores, by its config's architectures or by a head in its folder."""
    names = config.architectures or ()
    adapter = read_adapter(path)
    return (
        any(name.endswith("ForSequenceClassification") for name in names)
        or (Path(path or "").expanduser() / SCORE_HEAD_FILE).is_file()
        or (adapter is not None and "score" in adapter.modules_to_save)
    )


class RewardModelMixin:
    """What is added to a family's PreTrainedModel: its base model under `base_model_prefix`, and a head.

    As transformers' GenericForSequenceClassification, which takes sizes from the text's config in its newer versions only,
    and scores every token. In files, the base model is one that every class of the family loads.
    """

    config: Any
    base_model_prefix: str

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the family's
        setattr(self, self.base_model_prefix, AutoModel.from_config(config))
        self.score = torch.nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        cast("Any", self).post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **vision_inputs: Any
    ) -> SequenceClassifierOutput:
        """`logits` (B, labels) of ids (B, L), read at each row's last token that is not the text config's pad token.

        `seen`: what the base model takes beside them.
        """
        base = getattr(self, self.base_model_prefix)
        states = base(
            input_ids=input_ids, attention_mask=attention_mask, **vision_inputs
        ).last_hidden_state  # (B, L, H)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (places * (input_ids != self.config.get_text_config().pad_token_id)).argmax(-1)  # (B,)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        return SequenceClassifierOutput(logits=self.score(states[rows, last]))

    def save_pretrained(self, save_directory: str | Path, **settings: Any) -> None:
        """Write the base model as transformers does, and the head beside it."""
        base, beside = split_score_head(cast("PreTrainedModel", self))
        base.save_pretrained(str(save_directory), **settings)
        with gathered([cast("torch.nn.Parameter", value) for value in beside.values()]):
            tensors = {name: value.detach().cpu().contiguous() for name, value in beside.items()}
            save_file(tensors, str(Path(save_directory) / SCORE_HEAD_FILE), metadata={"format": "pt"})


def split_score_head(model: PreTrainedModel) -> tuple[PreTrainedModel, Mapping[str, torch.Tensor]]:
    """(The model whose names a folder's files have, what lies beside it): for all but `Scored`, the model alone."""
    if not isinstance(model, RewardModelMixin):
        return model, {}
    inside = cast("Any", model)
    return inside.base_model, {SCORE_WEIGHT_KEY: inside.score.weight}


def get_reward_model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a family's reward model: transformers' own, or one made of its base model and `Scored`.

    Scores are read at the last token that is not the text config's pad token. Raises RecipeError where the family has no
    base model that reads text from left to right.
    """
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        return found[0] if isinstance(found, tuple) else found
    base = MODEL_MAPPING.get(type(config), None)
    if base is None or config.is_encoder_decoder or not _is_causal_decoder(base):
        problem = (
            f"transformers has no reward model of the {config.model_type} family, and none can be made of what it has"
        )
        raise RecipeError(Fault("model", problem, "take a model of another family"))
    return _create_class(cast("Any", type(config)), base)


@cache
def _create_class(config_class: type[PretrainedConfig], base_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    family = next(one for one in base_class.__mro__ if one.__name__.endswith("PreTrainedModel"))
    name = f"{base_class.__name__.removesuffix('Model')}ForSequenceClassification"
    _register_key_mapping(name, config_class)
    # Its module is the family's: of what it takes for custom code, transformers does not rename weights.
    own = {"__module__": base_class.__module__, "base_model_prefix": base_class.base_model_prefix or "model"}
    return cast("type[PreTrainedModel]", type(name, (RewardModelMixin, family), own))


def _is_causal_decoder(base_class: type[PreTrainedModel]) -> bool:
    """Whether the base model takes ids first, and gives a state for each that has seen no later one."""
    signature = inspect.signature(base_class.forward)
    said = signature.return_annotation
    outputs = [one for one in (said, *get_args(said)) if dataclasses.is_dataclass(one)]
    states = any(field.name == "last_hidden_state" for one in outputs for field in dataclasses.fields(one))
    return [*signature.parameters][1] == "input_ids" and states


def _register_key_mapping(class_name: str, config_class: type[PretrainedConfig]) -> None:
    """Have weights renamed as for the family's class that writes text, where transformers goes by the class's name."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    if config_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        writer = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class].__name__
        if (renamed := get_checkpoint_conversion_mapping(writer)) is not None:
            register_checkpoint_conversion_mapping(class_name, renamed, overwrite=True)


class AutoRewardModel:
    """Reward models as transformers' Auto classes give others; a head that the files lack is drawn."""

    @staticmethod
    def from_pretrained(name: str, *, config: PretrainedConfig | None = None, **settings: Any) -> PreTrainedModel:
        """The model in a folder or on the hub: one that writes text, or an exported reward model. Collective under ZeRO-3."""
        trust = settings.get("trust_remote_code", False)
        config = config or AutoConfig.from_pretrained(name, trust_remote_code=trust)
        auto: Any = (
            AutoModelForSequenceClassification if has_classification_class(config) else get_reward_model_class(config)
        )
        head = _find_score_head(name) if issubclass(auto, RewardModelMixin) else None
        start = torch.get_rng_state()
        with _logging_disabled() if head else nullcontext():  # it would say that the head lacks
            model, said = auto.from_pretrained(name, config=config, output_loading_info=True, **settings)
        if head is not None:
            _load_score_head(model, head, said["missing_keys"])
        elif SCORE_WEIGHT_KEY in said["missing_keys"]:
            _init_score_head(model, start)
        return model

    @staticmethod
    def from_config(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
        """A model with drawn weights."""
        if has_classification_class(config):
            return AutoModelForSequenceClassification.from_config(config, **settings)
        settings.pop("trust_remote_code", None)
        return cast("Any", get_reward_model_class(config))._from_config(config, **settings)


def has_classification_class(config: PretrainedConfig) -> bool:
    """Whether transformers, or Python that comes with the model, has a class for it."""
    of_code = getattr(config, "auto_map", None) or {}
    return (
        type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        or AutoModelForSequenceClassification.__name__ in of_code
    )


def _find_score_head(name: str) -> str | None:
    """The file of a head in a folder or on the hub."""
    return cached_file(
        name,
        SCORE_HEAD_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


@contextmanager
def _logging_disabled() -> Iterator[None]:
    """Inside, transformers warns of nothing."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _init_score_head(model: Any, rng_state: torch.Tensor) -> None:
    """Draw the head from the generator's state `start`. Collective under ZeRO-3.

    The towers' constructors draw numbers too (CLIP's class embedding), but not where transformers builds them without
    memory: only so is the head the same at every stage.
    """
    outputs, inputs = full_shape(model.score.weight)
    torch.set_rng_state(rng_state)
    drawn = torch.nn.Linear(inputs, outputs, bias=False, device="cpu", dtype=torch.float32)
    model._init_weights(drawn)
    assign(model.score.weight, lambda: drawn.weight)


def _load_score_head(model: Any, file: str, missing_keys: Collection[str]) -> None:
    """Collective under ZeRO-3."""
    stored, place = load_file(file), model.score.weight
    if lost := sorted({*missing_keys} - {SCORE_WEIGHT_KEY}):
        raise RecipeError(f"{Path(file).parent}: missing keys: {first_names(lost)}; export it again")
    if stored.keys() != {SCORE_WEIGHT_KEY} or tuple(stored[SCORE_WEIGHT_KEY].shape) != full_shape(place):
        shapes = {name: tuple(value.shape) for name, value in stored.items()}
        raise RecipeError(f"{file}: holds {shapes}, and the model's head is {full_shape(place)}; export it again")
    assign(place, lambda: stored[SCORE_WEIGHT_KEY])


def load_reward_model(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """See `dstrain.load_reward_model`."""
    place = Path(folder).expanduser()
    if (place / "adapter_config.json").is_file():
        raise UsageError(f"{folder}: holds adapters alone; export the run with --merge-lora to write one whole model")
    if not (place / "config.json").is_file():
        raise UsageError(f"{folder}: holds no model (config.json); give a folder that `dstrain export` wrote")
    config = AutoConfig.from_pretrained(str(place))
    if found := find_hub_code(config):
        raise UsageError(f"{folder}: in its config {found}; remove the key from config.json")
    kinds = config.architectures or ["model of an unknown kind"]
    if not (place / SCORE_HEAD_FILE).is_file() and not kinds[0].endswith("ForSequenceClassification"):
        raise TaskError(f"{folder}: holds a {kinds[0]}, which gives no score; give the export of a reward model")
    settings = {} if dtype is None else {"dtype": dtype}
    try:
        return AutoRewardModel.from_pretrained(str(place), config=config, **settings).eval()
    except OSError as error:  # no weights, or some of their files
        raise UsageError(f"{folder}: cannot be loaded ({str(error).splitlines()[0]}); export it again") from error
