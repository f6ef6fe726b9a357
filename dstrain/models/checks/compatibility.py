"""Validation of a recipe's model against its task, from config and weight-file headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import MAX_NAMES, DataError, Fault, RecipeError, first_names
from dstrain.models.adapters.load import check_adapter
from dstrain.models.attention.model_types import NO_MASK_MODEL_TYPES
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


_EOS_HEAD_TYPES = ("bart", "bigbird_pegasus", "led", "mbart", "mvp", "plbart")
"""Encoder-decoders whose classification head reads the last EOS token of each row, and counts them."""


@dataclass
class ModelValidator:
    """Validator of a recipe's model and weight files for a task. `check` runs once, before training starts."""

    recipe: RunConfig
    heads: Sequence[str]
    """Names of modules that may be new."""
    can_generate: bool
    """True for a task whose model generates text."""
    warnings: Sequence[str] = ()
    """Warnings about positions beyond the trained range, missing keys, and unexpected keys of the model's body."""
    newly_initialized: Sequence[str] = ()
    """Keys of new heads."""
    info_messages: Sequence[str] = ()
    """Messages about new heads and merged adapters."""

    def check(self, meta_model: PreTrainedModel) -> None:
        """Raise RecipeError where the model does not fit. `meta_model`: the model on the meta device."""
        config, adapter = meta_model.config, read_adapter(self._model.path)
        if self.can_generate and is_bidirectional(config.model_type, getattr(config, "is_decoder", None)):
            key = "model.path" if self._model.path else "model.config"
            raise RecipeError(bidirectional_fault(key, config.model_type))
        if self.can_generate and sees_later_tokens(meta_model):
            key = "model.path" if self._model.path else "model.config.model_type"
            problem = f"{config.model_type} models see the tokens that they have to predict (tried on a small copy)"
            raise RecipeError(Fault(key, problem, "use a causal language model (Llama, Qwen, GPT-2 …)"))
        if not self.can_generate and config.model_type in _EOS_HEAD_TYPES:
            key = "model.path" if self._model.path else "model.config.model_type"
            problem = f"the score of a {config.model_type} model needs rows with equally many EOS tokens"
            raise RecipeError(Fault(key, problem, "use a causal language model (Llama, Qwen, GPT-2 …)"))
        from dstrain.models.router_loss import check_router_loss

        check_router_loss(meta_model, self._model.router_aux_loss_coef)
        check_positions(meta_model, config, self.recipe.data.max_length)
        check_freeze_and_groups(meta_model, self.recipe)
        self._check_files(meta_model)
        if self._model.init is not None:
            check_init(meta_model, self._model.init)
        if adapter is not None:  # last: it makes the meta model unusable
            check_adapter(meta_model, adapter)

    @property
    def _model(self) -> ModelConfig:
        return self.recipe.model

    def _check_files(self, meta_model: PreTrainedModel) -> None:
        report = build_load_report(meta_model, self._model) or LoadReport((), (), ())
        if faults := [shape_fault(one, self.heads) for one in report.mismatched[:MAX_NAMES]]:
            raise RecipeError(faults)
        missing = [name for name in report.missing if not is_head_key(name, self.heads)]
        total = len({id(tensor) for tensor in meta_model.state_dict(keep_vars=True).values()})
        layers = [name for name in missing if re.search(r"\.\d+\.", name)]
        # With a new head a few missing weights next to it (a pooler, a norm) are only worth a warning.
        if self._model.init is None and missing and (not self.heads or layers or len(missing) > total / 2):
            raise RecipeError(self._missing_weights_fault(meta_model, missing))
        too_long = rope_length_warning(meta_model.config, self.recipe.data.max_length)
        self.warnings = [*filter(None, [too_long]), *self._iter_warnings(meta_model, report, missing)]
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
            yield f"{path} is a LoRA adapter of {adapter.base_model}: it is merged into these weights on loading"
        if self.newly_initialized:
            keys = f"{first_names(self.newly_initialized)} (the files of {path} have no such head)"
            yield f"newly initialized from seed {self.recipe.seed}: {keys}"

    def _missing_weights_fault(self, meta_model: PreTrainedModel, missing: Sequence[str]) -> Fault:
        architectures = ", ".join(meta_model.config.architectures or ()) or "none"
        keys = f"missing keys: {first_names(missing)}"
        problem = f"'{self._model.path}' does not hold all weights of a {type(meta_model).__name__} ({keys})"
        return Fault(
            "model.path", problem, f"use a model of this class (architectures in its config.json: {architectures})"
        )

    def _iter_warnings(self, meta_model: PreTrainedModel, report: LoadReport, missing: Sequence[str]) -> Iterator[str]:
        body, path = f"{meta_model.base_model_prefix}.", self._model.path
        unexpected = [name for name in report.unexpected if not self.heads or name.startswith(body)]
        if missing and self._model.init is None:
            yield f"missing keys in the files of {path}: {first_names(missing)}; newly initialized from the seed"
        if unexpected:
            yield f"unexpected keys in the files of {path}: {first_names(unexpected)}; ignored"


def check_trains_on_text(meta_model: PreTrainedModel, model: ModelConfig) -> None:
    """Raise DataError where no trainable parameter takes part in text-only samples. Freezes `meta_model`."""
    freeze(meta_model, model.freeze)
    if not trains_on_text(meta_model):
        problem = "no record has an image, and model.freeze leaves no parameter that text alone can train"
        raise DataError(Fault("data.train", problem, "give records with images, or freeze less"))


_SMALL_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim_model": 32, "embedding_size": 32,
    "intermediate_size": 64, "d_inner": 64, "n_inner": 64, "dim_ff": 64, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "num_key_value_heads": 4, "decoder_attention_heads": 4, "d_head": 8, "head_dim": 8, "dim_head": 8,
    "max_position_embeddings": 64, "n_positions": 64,
}  # fmt: skip
"""Sizes of the copy that is probed, under the names of different families."""
_CAUSALITY_TOLERANCE = 1e-4
_NUM_TOKENS = 16


def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return True where the logits of a token depend on later tokens, as those of XLNet and CPM-Ant do.

    A small copy of the family is run on two rows that differ in their second halves. Families whose logits are compared
    by tests are not probed, nor are those of which no small copy can be made, or which take images.
    """
    config: Any = model.config
    if config.model_type in NO_MASK_MODEL_TYPES or hasattr(config, "vision_config"):
        return False
    if not type(model).__module__.startswith("transformers."):  # code that came with the weights
        return False
    settings = tuple((name, value) for name in _ATTENTION_KEYS if (value := getattr(config, name, None)) is not None)
    model_type: Any = type(model)
    config_type: Any = type(config)
    return bool(_logits_differ(model_type, config_type, settings))


_ATTENTION_KEYS = ("is_decoder", "use_bidirectional_attention", "attn_type", "bi_data")
"""Settings that decide whether a family is causal."""


@cache
def _logits_differ(model_type: Any, config_type: Any, settings: tuple[tuple[str, Any], ...]) -> bool:
    import torch

    known = config_type().to_dict()
    attributes = {**{value: name for name, value in config_type.attribute_map.items()}, **config_type.attribute_map}
    sizes = {name: size for name, size in _SMALL_SIZES.items() if name in known or name in attributes}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = model_type(config_type(**sizes, **dict(settings))).float().eval()
            ids = torch.arange(2 * _NUM_TOKENS).view(2, _NUM_TOKENS) % 32 + 8
            ids[1, : _NUM_TOKENS // 2] = ids[0, : _NUM_TOKENS // 2]
            logits = model(input_ids=ids).logits[:, : _NUM_TOKENS // 2].float()
    except Exception:  # a family with other needs: it is tried by its own training
        return False
    return bool((logits[0] - logits[1]).abs().max() > _CAUSALITY_TOLERANCE * logits.abs().max())
