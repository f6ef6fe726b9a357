"""Vision-language processors, read from a folder or built for a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError
from dstrain.models.load import load_pretrained, set_pad_token
from dstrain.models.patches import set_special_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKEN_ID_KEYS = (
    "image_token_id",
    "boi_token_id",
    "eoi_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Config settings with ids of the processor's special tokens."""
PROCESSOR_KEY = "model.processor"
PROCESSOR_FOLDER_FIX = "give a folder with its processor"


def read_processor(name: str, key: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Load a processor from a folder or the Hub; its tokenizer gets its chat template, and a pad token if it has none.

    Raises RecipeError where it cannot be loaded, is only a tokenizer, or makes image inputs that depend on the text.
    """
    from transformers import AutoProcessor

    processor = load_pretrained(AutoProcessor, name, key, trust_remote_code, revision)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        problem = f"'{name}' holds a {type(processor).__name__}, not a processor of texts and images"
        raise RecipeError(Fault(key, problem, f"set {PROCESSOR_KEY} to a folder or hub id that has one"))
    if type(processor).__name__ == "MllamaProcessor":
        why = "which is not supported: its cross-attention masks depend on the complete text"
        fix = "use a model of another family (LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL …)"
        raise RecipeError(Fault(key, f"'{name}' is a model of the family Llama 3.2 Vision (mllama), {why}", fix))
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    used_tokens = {
        value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)
    }
    set_pad_token(tokenizer, key, used_tokens)
    return processor


def limit_pixels(processor: Any, max_pixels: int) -> None:
    """Reduce larger images to this many pixels. Raises RecipeError where the processor has no such limit."""
    images, key = processor.image_processor, f"{PROCESSOR_KEY}.max_pixels"
    if "max_pixels" not in getattr(getattr(images, "valid_kwargs", None), "__annotations__", ()):
        problem = f"is {max_pixels}, but a {type(images).__name__} gives each image its own size"
        raise RecipeError(Fault(key, problem, "leave it out"))
    settings = images.to_dict()
    least = settings["size"]["shortest_edge"]
    if max_pixels < least:
        raise RecipeError(Fault(key, f"is {max_pixels}, below the least of the processor", f"write {least} or more"))
    processor.image_processor = type(images).from_dict({**settings, "max_pixels": max_pixels})


def build_processor(
    config: PretrainedConfig, tokenizer: Any, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Any:
    """Build a processor for a model made from this config. The tokenizer gets the family's special tokens.

    Images become squares of the tower's size. `mean`, `std`: per channel, of values in 0–1; None: the family's own.
    Raises RecipeError for a family or a tower whose processor must come from a folder.
    """
    family = _get_family(config)
    _add_special_tokens(tokenizer, family.special_tokens)
    stats = {"image_mean": mean, "image_std": std}
    return family.build(config, tokenizer, {name: [*values] for name, values in stats.items() if values is not None})


def count_special_tokens(config: PretrainedConfig) -> int:
    """Return how many entries `build_processor` may add to a tokenizer. Raises RecipeError for an unknown family."""
    return len(_get_family(config).special_tokens)


def sync_config_with_processor(config: PretrainedConfig, processor: Any) -> None:
    """Write the ids of a processor's tokens, and the token counts that follow from the tower's size, into a config.

    For a model built from `model.config`, whose default ids belong to another tokenizer.
    """
    tokenizer = processor.tokenizer
    for name in TOKEN_ID_KEYS:
        owner = tokenizer if hasattr(tokenizer, name) else processor  # Gemma 3's processor calls its boi image_token
        if hasattr(config, name) and getattr(owner, name, None) is not None:
            setattr(config, name, getattr(owner, name))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # Reward models find the end of a row by the text config's pad token.
        setattr(config.get_text_config(), name, getattr(tokenizer, name))
    if config.model_type == "gemma3":
        config.mm_tokens_per_image = _count_pooled_tokens(config)
    if config.model_type == "llava":
        config.image_seq_length = _count_llava_tokens(config)


@dataclass(frozen=True, kw_only=True)
class _ProcessorFamily:
    """Special tokens and builder of one family's processors."""

    special_tokens: Mapping[str, str]
    """Name of a special token, an attribute of the tokenizer -> its text."""
    build: Callable[[Any, Any, Mapping[str, list[float]]], Any]
    """(config, tokenizer, image mean and standard deviation) -> processor."""


def _get_family(config: PretrainedConfig) -> _ProcessorFamily:
    if config.model_type not in PROCESSOR_BUILDERS:
        problem = f"none can be built for a {config.model_type} model (only for {', '.join(PROCESSOR_BUILDERS)})"
        raise RecipeError(Fault(PROCESSOR_KEY, problem, PROCESSOR_FOLDER_FIX))
    return PROCESSOR_BUILDERS[config.model_type]


def _add_special_tokens(tokenizer: Any, tokens: Mapping[str, str]) -> None:
    """Add the tokens to the tokenizer, each also as an attribute. Existing tokens stay as they are."""
    from transformers import AddedToken

    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in tokens.values()], True)
    new = {name: text for name, text in tokens.items() if name not in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    set_special_tokens(tokenizer, new)


def _build_image_processor(class_name: str, **settings: Any) -> Any:
    """Return an image processor of the backend that AutoProcessor would choose: torchvision if it is installed."""
    import transformers
    from transformers.models.auto.image_processing_auto import DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS
    from transformers.utils import is_torchvision_available

    use_pil = not is_torchvision_available() or class_name in DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS
    return getattr(transformers, f"{class_name}Pil" if use_pil else class_name)(**settings)


def _get_image_size(config: Any) -> int:
    """Return the side of the tower's images in pixels. Raises RecipeError where they are not square."""
    size = config.vision_config.image_size
    sides = {size} if isinstance(size, int) else {*size}
    if len(sides) != 1:
        problem = f"none can be built for images of {size}, which are not square"
        raise RecipeError(Fault(PROCESSOR_KEY, problem, PROCESSOR_FOLDER_FIX))
    return int(sides.pop())


LLAVA_TOWERS: Mapping[str, tuple[str, int]] = {
    "clip_vision_model": ("CLIPImageProcessor", 1),
    "siglip_vision_model": ("SiglipImageProcessor", 0),
}
"""Model type of a LLaVA's tower -> its image processor, and the number of features before the patches' (CLS)."""


def _build_llava(config: Any, tokenizer: Any, normalization: Mapping[str, list[float]]) -> Any:
    """Build a LLaVA processor: one token per patch, by default without CLS (arXiv 2310.03744, section 3.3)."""
    from transformers import LlavaProcessor

    class_name, num_extra = _get_tower(config)
    side = _get_image_size(config)
    square = {"height": side, "width": side}
    sizes = {"size": {"shortest_edge": side}, "crop_size": square} if num_extra else {"size": square}
    return LlavaProcessor(
        _build_image_processor(class_name, **sizes, **normalization),
        tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=num_extra,
    )


def _get_tower(config: Any) -> tuple[str, int]:
    model_type = config.vision_config.model_type
    if model_type not in LLAVA_TOWERS:
        problem = f"none can be built for a llava model with a {model_type} (only with {' or '.join(LLAVA_TOWERS)})"
        raise RecipeError(Fault(PROCESSOR_KEY, problem, PROCESSOR_FOLDER_FIX))
    return LLAVA_TOWERS[model_type]


def _count_llava_tokens(config: Any) -> int:
    """Return the tokens of an image. The strategy `default` drops the first feature (CLS)."""
    num_features = (_get_image_size(config) // config.vision_config.patch_size) ** 2 + _get_tower(config)[1]
    return int(num_features - (config.vision_feature_select_strategy == "default"))


def _build_gemma3(config: Any, tokenizer: Any, normalization: Mapping[str, list[float]]) -> Any:
    """Build a Gemma 3 processor: a square of patches, pooled to a smaller one (arXiv 2503.19786, section 2.1)."""
    from transformers import Gemma3Processor

    side = _get_image_size(config)
    images = _build_image_processor("Gemma3ImageProcessor", size={"height": side, "width": side}, **normalization)
    return Gemma3Processor(images, tokenizer, image_seq_length=_count_pooled_tokens(config))


def _count_pooled_tokens(config: Any) -> int:
    """Return the tokens of an image: `mm_tokens_per_image`, rounded to what pooling whole patches can give."""
    patches = _get_image_size(config) // config.vision_config.patch_size  # per side
    tokens = max(1, min(isqrt(config.mm_tokens_per_image), patches))
    return int((patches // (patches // tokens)) ** 2)


def _build_idefics3(config: Any, tokenizer: Any, normalization: Mapping[str, list[float]]) -> Any:
    """Build an Idefics 3 processor: pixel shuffle merges scale_factor² patches (arXiv 2408.12637, section 2.2).

    Images are not split into tiles, which would need a special token for each position of a tile.
    """
    from transformers import Idefics3Processor

    longest = {"longest_edge": _get_image_size(config)}
    images = _build_image_processor(
        "Idefics3ImageProcessor", size=longest, max_image_size=longest, do_image_splitting=False, **normalization
    )
    patches = _get_image_size(config) // config.vision_config.patch_size
    return Idefics3Processor(images, tokenizer, image_seq_len=patches**2 // config.scale_factor**2)


PROCESSOR_BUILDERS: Mapping[str, _ProcessorFamily] = {
    "llava": _ProcessorFamily(special_tokens={"image_token": "<image>"}, build=_build_llava),
    "gemma3": _ProcessorFamily(
        special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        build=_build_gemma3,
    ),
    "idefics3": _ProcessorFamily(
        special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        build=_build_idefics3,
    ),
}
"""Model type -> special tokens and builder of its processors."""
