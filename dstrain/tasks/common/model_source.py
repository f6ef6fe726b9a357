"""The model of a recipe: its config, tokenizer, processor and class, and how it is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.config import most_tokens_of_pass
from dstrain.config.schema import ModelConfig, ProcessorConfig, RunConfig, TokenizerConfig
from dstrain.data.encoding.chat_template import reads_clock, set_template_time, tokenizer_fingerprint
from dstrain.errors import Fault, RecipeError
from dstrain.host_limits import count_available_cores
from dstrain.models.adapters import load_adapters
from dstrain.models.folder import find_tokenizer_place
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from dstrain.models.load import build_meta_model, is_multimodal, load_model, read_config, read_tokenizer, set_pad_token
from dstrain.models.processors import (
    build_processor,
    count_special_tokens,
    limit_pixels,
    read_processor,
    sync_config_with_processor,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from dstrain.data.sources.base import ConcatSource
    from dstrain.data.vision.processor import VisionProcessor

LOADING_KEYS = ("is_local", "local_files_only")
"""Keys that transformers adds to a tokenizer's settings when it loads one, and would save: how it was found here."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A transformers model as `recipe.model` describes it. Everything is read when it is first used."""

    task: Any
    """The `TextTask` whose recipe names the model, and from whose records a tokenizer may be trained."""
    auto_class_name: ClassVar[str] = "AutoModelForCausalLM"
    """The class of transformers that loads a text-only model."""

    @property
    def recipe(self) -> RunConfig:
        """The recipe of the task."""
        recipe: RunConfig = self.task.recipe
        return recipe

    @property
    def is_named(self) -> bool:
        """True where the recipe names a model; `dstrain data check` needs none."""
        return bool(self.recipe.model.path or self.recipe.model.config)

    @property
    def reads_text(self) -> bool:
        """True where the model has a tokenizer."""
        return True

    @property
    def can_generate(self) -> bool:
        """True where the model writes text, token by token."""
        return self.auto_class_name == "AutoModelForCausalLM"

    @property
    def writes_time(self) -> bool:
        """True where the tokenizer's chat template writes the present time into each sample."""
        return self.reads_text and reads_clock(self.tokenizer)

    @property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer, or of the processor with its tokenizer; None where the model has none."""
        if not self.reads_text:
            return None
        processor = self.vision_processor
        return tokenizer_fingerprint(self.tokenizer) if processor is None else processor.fingerprint

    @property
    def has_own_load(self) -> bool:
        """True where a subclass, in a user's file, loads in its own way: model.path may then mean anything."""
        return type(self).load is not ModelSource.load

    @cached_property
    def is_multimodal(self) -> bool:
        """True where the model takes images."""
        return is_multimodal(self.config)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The model's config as it is on disk or in the recipe."""
        return read_config(self.recipe.model)

    @property
    def auto_class(self) -> Any:
        """The class whose `from_pretrained` and `from_config` make the model."""
        import transformers

        if self.is_multimodal and not self.can_generate:
            from dstrain.models.reward_model import AutoRewardModel

            return AutoRewardModel()
        if self.is_multimodal:
            return transformers.AutoModelForImageTextToText
        return getattr(transformers, self.auto_class_name)

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        """Return the model's config as the task needs it."""
        from huggingface_hub.errors import StrictDataclassFieldValidationError

        config = read_config(model)
        if model.config is not None:  # the family's defaults are the ids of another tokenizer
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                token = getattr(self.tokenizer, name)
                # Some families (CWM) allow no null there, and never write the token themselves.
                with contextlib.suppress(StrictDataclassFieldValidationError) if token is None else nullcontext():
                    setattr(config, name, token)
            if self.vision_processor is not None:
                sync_config_with_processor(config, self.vision_processor.hf_processor)
        return config

    def load(self, model: ModelConfig) -> torch.nn.Module:
        """Load or initialize the model that `model` describes. Collective under ZeRO-3."""
        from dstrain.models.fused_kernels import fuse_kernels, takes_fused_kernels
        from dstrain.models.tiles import can_need_tiles, enable_tiles
        from dstrain.tasks.common.forward import disable_dropout_in_model

        loaded = load_model(self.auto_class, model, self.build_config(model), self.recipe.seed)
        # On the model, not in its config, which an export writes.
        if self.task.disables_dropout:
            disable_dropout_in_model(loaded)
        if takes_fused_kernels(model.kernels):
            fuse_kernels(loaded)
        if model.gradient_checkpointing:
            enable_gradient_checkpointing(loaded, float(model.gradient_checkpointing))
        if can_need_tiles(model.tiled_mlp, most_tokens_of_pass(self.recipe, self.task.rows_per_sample)):
            enable_tiles(loaded, model.tiled_mlp)
        return loaded

    def build_meta_model(self) -> torch.nn.Module:
        """Return the model on the meta device: names and shapes without values. Raises RecipeError.

        They do not depend on the attention implementation, which may need a package or a GPU that a login node lacks.
        """
        model = self.recipe.model.model_copy(update={"attn_implementation": "auto"})
        return build_meta_model(self.auto_class, model, self.build_config(model))

    def check_attn_implementation(self) -> None:
        """Raise RecipeError where the model cannot train on this machine with its attention implementation."""
        model = self.recipe.model
        check_attn_implementation(model, self.recipe.precision)
        text = self.config.get_text_config()
        if model.attn_implementation == "eager" and text.model_type == "falcon" and text.alibi:
            problem = "transformers' eager attention adds the ALiBi biases of a falcon model twice"
            raise RecipeError(Fault(_ATTN_KEY, problem, "use sdpa or auto"))
        if model.attn_implementation != "auto":  # whether the family has it is seen by building the model
            build_meta_model(self.auto_class, model, self.build_config(model))

    def reload(self, folder: Path) -> torch.nn.Module:
        """Load the model, or the base with the adapters, of an exported folder."""
        if not (folder / "adapter_config.json").is_file():
            return self.auto_class.from_pretrained(str(folder))
        from dstrain.models.quantization import quantize_model

        base, quantize = self.load(self.recipe.model), self.recipe.model.quantize
        if quantize is not None:
            quantize_model(base, quantize, self.task.export.modules_to_save)
        return load_adapters(base, folder)

    def save_processor(self, folder: Path) -> None:
        """Write the tokenizer, or the processor with its tokenizer; nothing for a model without one."""
        processor = self.vision_processor
        saved = self.tokenizer if processor is None else processor.hf_processor
        if saved is not None:
            tokenizer = saved if processor is None else processor.tokenizer
            with _saved_settings(tokenizer, self.can_generate):
                saved.save_pretrained(str(folder))

    @property
    def tokenizer(self) -> Any:
        """The task's tokenizer: `recipe_tokenizer`, unless the task makes its own."""
        return self.task.tokenizer

    @cached_property
    def recipe_tokenizer(self) -> Any:
        """The tokenizer that the recipe names, with a pad token and the recipe's chat template."""
        if self.vision_processor is None:
            return self._set_chat_template(self.base_tokenizer)
        return self.vision_processor.tokenizer

    def _set_chat_template(self, tokenizer: Any, image_token: str = "") -> Any:
        """Put the recipe's chat template into the tokenizer, where it has one. Raises RecipeError."""
        from dstrain.data.encoding.chat_template import resolve_chat_template, set_template_kwargs

        wanted = self.recipe.model.chat_template
        if wanted is not None:
            tokenizer.chat_template = resolve_chat_template(wanted, tokenizer, image_token)
        set_template_kwargs(tokenizer, self.recipe.model.chat_template_kwargs)
        if reads_clock(tokenizer):
            recorded = self.recipe.model.chat_template_time
            set_template_time(tokenizer, datetime.fromisoformat(recorded) if recorded else datetime.now())
        return tokenizer

    @cached_property
    def vision_processor(self) -> VisionProcessor | None:
        """The processor of a vision-language model; None for a text-only model."""
        if not self.is_multimodal:
            return None
        model = self.recipe.model
        is_named = isinstance(model.processor, str)
        name, revision = (model.processor, None) if is_named else find_tokenizer_place(model)
        if not isinstance(name, str):
            stats = self._image_stats()
            return self._wrap_processor(build_processor(self.config, self.base_tokenizer, *stats))
        if model.tokenizer is not None:
            fix = "leave it out, or put it into the folder that model.processor names"
            problem = "a vision-language model takes the tokenizer of its processor"
            raise RecipeError(Fault("model.tokenizer", problem, fix))
        key = "model.processor" if is_named else "model.path"
        return self._wrap_processor(read_processor(name, key, model.trust_remote_code, revision))

    def _wrap_processor(self, processor: Any) -> VisionProcessor:
        from dstrain.data.vision.processor import VisionProcessor

        wanted = self.recipe.model.processor
        if isinstance(wanted, ProcessorConfig) and wanted.max_pixels is not None:
            limit_pixels(processor, wanted.max_pixels)
        wrapped = VisionProcessor(processor)
        tokenizer = self._set_chat_template(processor.tokenizer, wrapped.image_token)
        # Both are saved, and must not differ.
        processor.chat_template = tokenizer.chat_template
        return wrapped

    def _image_stats(self) -> tuple[list[float] | None, list[float] | None]:
        """Return mean and deviation of the training images, where the recipe asks for them."""
        from dstrain.data.vision.processor import compute_image_stats

        wanted = self.recipe.model.processor
        if not isinstance(wanted, ProcessorConfig) or wanted.normalize is None:
            return None, None
        return compute_image_stats(self._open_training(), self.task.parse_record, count_available_cores())

    def _open_training(self) -> ConcatSource:
        source: ConcatSource = self.task.open_sources(self.task.training_items)
        return source

    @cached_property
    def base_tokenizer(self) -> Any:
        """The tokenizer of a folder, or a trained one, without the tokens that a processor adds."""
        from dstrain.data.encoding.trained_tokenizer import load_or_train_tokenizer

        model = self.recipe.model
        wanted = model.tokenizer
        if wanted is None and model.config is not None:
            size = getattr(self.config.get_text_config(), "vocab_size", 32000)
            # The processor adds its tokens to the tokenizer later, within the same vocabulary.
            size -= count_special_tokens(self.config) if self.is_multimodal else 0
            # Without validation: load_or_train_tokenizer refuses a size too small, and names the key.
            wanted = TokenizerConfig.model_construct(vocab_size=size)
        if isinstance(wanted, TokenizerConfig):
            texts = self.task.iter_texts, self.task.texts_name
            return load_or_train_tokenizer(self._open_training(), *texts, wanted.vocab_size, wanted.alphabet)
        key = "model.path" if wanted is None else "model.tokenizer"
        place, revision = find_tokenizer_place(model) if wanted is None else (wanted, None)
        tokenizer = read_tokenizer(place or "", key, model.trust_remote_code, revision)
        set_pad_token(tokenizer, key)
        return tokenizer


@contextlib.contextmanager
def _saved_settings(tokenizer: Any, can_generate: bool) -> Iterator[None]:
    """Give a tokenizer the settings inside that its folder needs: not how it was found here, and the padding side.

    A batch of prompts that is padded on the right is answered wrongly by the programs that read the folder.
    """
    settings, side = getattr(tokenizer, "init_kwargs", {}), tokenizer.padding_side
    for key in LOADING_KEYS:
        settings.pop(key, None)
    if not can_generate:
        yield
        return
    before = {**settings}
    settings["padding_side"] = tokenizer.padding_side = "left"  # the attribute alone is not saved
    try:
        yield
    finally:
        tokenizer.padding_side = side
        settings.clear()
        settings.update(before)


_ATTN_KEY = "model.attn_implementation"
_OR_SDPA = "or use sdpa or auto"
FLASH_PACKAGES: dict[str, tuple[str, str, tuple[int, int]]] = {
    "flash_attention_2": ("flash_attn", "flash-attn", (8, 0)),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3", (8, 0)),
}
"""Implementation -> (module, its package, least compute capability)."""


def check_attn_implementation(model: ModelConfig, precision: str) -> None:
    """Raise RecipeError where the recipe's attention implementation cannot train on this machine.

    `precision`: the recipe's; whether the model's family supports it is seen when the model is built.
    """
    fault = next(_find_attn_faults(model, precision), None)
    if fault is not None:
        raise RecipeError(Fault(_ATTN_KEY, *fault))


def _find_attn_faults(model: ModelConfig, precision: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix)."""
    name = model.attn_implementation
    if name == "flex_attention":
        if not _compute_capability():
            yield "flex_attention has no gradients on a CPU", "train on a GPU, " + _OR_SDPA
        return
    is_kernel = "/" in name
    if not is_kernel and name not in FLASH_PACKAGES:
        return
    if is_kernel and not model.trust_remote_code:
        fix = "add --set model.trust_remote_code=true if you trust that code, " + _OR_SDPA
        yield f"'{name}' is code on the Hub", fix
    module, package, needed = FLASH_PACKAGES.get(name, ("kernels", "kernels", (8, 0)))
    if find_spec(module) is None:
        yield f"{name} needs the package {package}, which is not installed", f"install it, {_OR_SDPA}"
    capability = _compute_capability()
    if capability is None:
        yield f"{name} needs a GPU, and torch sees none", "use sdpa or auto"
    elif not is_kernel and capability < needed:
        found, least = (".".join(map(str, one)) for one in (capability, needed))
        yield f"{name} needs compute capability {least}; this GPU has {found}", "use sdpa or auto"
    if precision == "fp32":
        yield f"{name} computes in bf16 or fp16, not in fp32", "set precision: bf16, " + _OR_SDPA


def _compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU, or None without a GPU."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
