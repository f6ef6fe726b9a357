"""Processors: what turns a text with marks and its images into a model's inputs. Read from a folder, or made for a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError
from dstrain.models.load import load_pretrained
from dstrain.models.padding import set_pad_token
from dstrain.models.patches import set_special_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VISION_CONFIG_KEYS = ("vision_config", "vq_config")
"""Settings under which configs keep the part that sees."""
TOKEN_ID_KEYS = (
    "image_token_id",
    "boi_token_id",
    "eoi_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Settings of configs that name tokens of the processor's."""
UNSUPPORTED_PROCESSORS = {
    "MllamaProcessor": (
        "the family Llama 3.2 Vision (mllama)",
        "its masks over images follow from each text as a whole",
    ),
}
"""Processors whose inputs for images cannot be made apart from the text -> family, reason."""
PROCESSOR_KEY = "model.processor"
PROCESSOR_FOLDER_FIX = "give a folder with its processor"


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether a model with this config reads images and writes text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    known = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return known and any(getattr(config, name, None) is not None for name in VISION_CONFIG_KEYS)


def read_processor(name: str, key: str, trust_remote_code: bool = False) -> Any:
    """The processor in a folder or on the hub; its tokenizer gets its chat template and a pad token where it has none.

    Raises RecipeError where it cannot be had, is a tokenizer alone, or is one of UNSUPPORTED.
    """
    from transformers import AutoProcessor

    processor = load_pretrained(AutoProcessor, name, key, trust_remote_code)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        problem = f"'{name}' holds a {type(processor).__name__} and no processor of texts and images"
        raise RecipeError(Fault(key, problem, f"set {PROCESSOR_KEY} to a folder or hub id that has one"))
    if type(processor).__name__ in UNSUPPORTED_PROCESSORS:
        family, why = UNSUPPORTED_PROCESSORS[type(processor).__name__]
        mend = "name a model of another family (LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL …)"
        raise RecipeError(Fault(key, f"'{name}' is a model of {family}, which is not supported: {why}", mend))
    tokenizer = processor.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    named = {value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)}
    set_pad_token(tokenizer, key, named)
    return processor


def build_processor(
    config: PretrainedConfig, tokenizer: Any, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Any:
    """A processor for a model made from this config, around this tokenizer, which gets the family's special tokens.

    Images become squares of the tower's size. `mean`, `std`: of the images per channel, in shares of the brightest;
    None: the family's own. Raises RecipeError for a family or a tower whose processor must come from a folder.
    """
    family = _get_family(config)
    _add_special_tokens(tokenizer, family.special_tokens)
    given = {"image_mean": mean, "image_std": std}
    return family.build(config, tokenizer, {name: [*values] for name, values in given.items() if values is not None})


def count_special_tokens(config: PretrainedConfig) -> int:
    """How many entries `make_processor` may add to a tokenizer. Raises RecipeError as it does."""
    return len(_get_family(config).special_tokens)


def sync_config_with_processor(config: PretrainedConfig, processor: Any) -> None:
    """Write the ids of a processor's tokens, and the counts that follow from the tower's size, into a model's config.

    For a model made from `model.config`, whose defaults are another tokenizer's; the processor may be made or read.
    """
    tokenizer = processor.tokenizer
    for name in TOKEN_ID_KEYS:
        owner = tokenizer if hasattr(tokenizer, name) else processor  # Gemma 3's processor calls its boi image_token
        if hasattr(config, name) and getattr(owner, name, None) is not None:
            setattr(config, name, getattr(owner, name))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.get_text_config(), name, getattr(tokenizer, name))
    if config.model_type == "gemma3":
        config.mm_tokens_per_image = _count_pooled_tokens(config)
    if config.model_type == "llava":
        config.image_seq_length = _count_llava_tokens(config)


@dataclass(frozen=True, kw_only=True)
class _ProcessorFamily:
    special_tokens: Mapping[str, str]
    """Name of a special token, an attribute of the tokenizer -> how it is written."""
    build: Callable[[Any, Any, Mapping[str, list[float]]], Any]
    """(config, tokenizer, mean and deviation) -> processor."""


def _get_family(config: PretrainedConfig) -> _ProcessorFamily:
    if config.model_type not in PROCESSOR_BUILDERS:
        problem = f"none can be made for a {config.model_type} model (only for {', '.join(PROCESSOR_BUILDERS)})"
        raise RecipeError(Fault(PROCESSOR_KEY, problem, PROCESSOR_FOLDER_FIX))
    return PROCESSOR_BUILDERS[config.model_type]


def _add_special_tokens(tokenizer: Any, tokens: Mapping[str, str]) -> None:
    """Give the tokenizer the tokens, each also as an attribute; those that it has stay what they are."""
    from transformers import AddedToken

    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in tokens.values()], True)
    new = {name: text for name, text in tokens.items() if name not in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    set_special_tokens(tokenizer, new)


def _build_image_processor(class_name: str, **settings: Any) -> Any:
    """Of the kind that AutoProcessor takes for a folder with one: torchvision's where that is installed."""
    import transformers
    from transformers.models.auto.image_processing_auto import DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS
    from transformers.utils import is_torchvision_available

    plain = not is_torchvision_available() or class_name in DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS
    return getattr(transformers, f"{class_name}Pil" if plain else class_name)(**settings)


def _get_image_size(config: Any) -> int:
    """Pixels of a side of the tower's images."""
    size = config.vision_config.image_size
    sides = {size} if isinstance(size, int) else {*size}
    if len(sides) != 1:
        raise RecipeError(
            Fault(PROCESSOR_KEY, f"none can be made for images of {size}, which are no squares", PROCESSOR_FOLDER_FIX)
        )
    return int(sides.pop())


LLAVA_TOWERS: Mapping[str, tuple[str, int]] = {
    "clip_vision_model": ("CLIPImageProcessor", 1),
    "siglip_vision_model": ("SiglipImageProcessor", 0),
}
"""Kind of a LLaVA's tower -> its image processor, and how many features stand before those of the patches (CLS)."""


def _build_llava(config: Any, tokenizer: Any, normalization: Mapping[str, list[float]]) -> Any:
    """Liu et al. (arXiv 2310.03744), section 3.3: the features of all patches, of which the CLS is left out by default."""
    from transformers import LlavaProcessor

    kind, before = _get_tower(config)
    side = _get_image_size(config)
    square = {"height": side, "width": side}
    sizes = {"size": {"shortest_edge": side}, "crop_size": square} if before else {"size": square}
    return LlavaProcessor(
        _build_image_processor(kind, **sizes, **normalization),
        tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=before,
    )


def _get_tower(config: Any) -> tuple[str, int]:
    kind = config.vision_config.model_type
    if kind not in LLAVA_TOWERS:
        problem = f"none can be made for a llava model with a {kind} (only with {' or '.join(LLAVA_TOWERS)})"
        raise RecipeError(Fault(PROCESSOR_KEY, problem, PROCESSOR_FOLDER_FIX))
    return LLAVA_TOWERS[kind]


def _count_llava_tokens(config: Any) -> int:
    """Features of an image, which `default` takes the first from."""
    whole = (_get_image_size(config) // config.vision_config.patch_size) ** 2 + _get_tower(config)[1]
    return int(whole - (config.vision_feature_select_strategy == "default"))


def _build_gemma3(config: Any, tokenizer: Any, normalization: Mapping[str, list[float]]) -> Any:
    """Gemma 3 (arXiv 2503.19786), section 2.1: a square of patches, pooled to a smaller one."""
    from transformers import Gemma3Processor

    side = _get_image_size(config)
    images = _build_image_processor("Gemma3ImageProcessor", size={"height": side, "width": side}, **normalization)
    return Gemma3Processor(images, tokenizer, image_seq_length=_count_pooled_tokens(config))


def _count_pooled_tokens(config: Any) -> int:
    """Tokens of an image: `mm_tokens_per_image`, or what the model's pooling of whole patches makes of that number."""
    patches = _get_image_size(config) // config.vision_config.patch_size
    wanted = max(1, min(isqrt(config.mm_tokens_per_image), patches))
    return int((patches // (patches // wanted)) ** 2)


def _build_idefics3(config: Any, tokenizer: Any, normalization: Mapping[str, list[float]]) -> Any:
    """Idefics 3 (arXiv 2408.12637), section 2.2: pixel shuffle makes one token of scale_factor^2 patches.

    An image is shown whole, not in tiles as well, which would take a token for each place a tile can have.
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
"""Kind of a model -> how its processor is made."""
