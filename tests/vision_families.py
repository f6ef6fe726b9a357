"""Tiny models of image-text families with their own processors, in folders as those of a recipe's `model.path`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import is_torchvision_available

from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.models.patches import set_special_tokens
from tests.vision_recipes import TEXT

HIDDEN = TEXT["hidden_size"]
SIDE, PATCH = 16, 4
"""Pixels of a square image, and of its patches: 16 patches, or 4 of 2 x 2."""
TILES = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
WORDS = ["what is it? a fox, a dog", "How many? I see 0, 1, 2. No idea."]
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2,
    "out_hidden_size": HIDDEN, "num_position_embeddings": 64,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH,
}  # fmt: skip
SQUARE = {"height": SIDE, "width": SIDE}
PIXELS = {"shortest_edge": 64, "longest_edge": 64 * 12}
TILE_TOKENS = {f"row_{row}_col_{col}": f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)}
IDEFICS_TOKENS = {
    "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}  # fmt: skip
IDEFICS_IMAGES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """How a family's tiny model and its processor are made."""

    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    processor: str
    images: str
    """Class of its image processor."""
    image_settings: Mapping[str, Any]
    videos: str | None = None
    """Class of its video processor, which needs torchvision; None: it has none."""
    tokens: Mapping[str, str]
    """Attribute of the tokenizer -> special token."""
    id_keys: Mapping[str, str]
    """Setting of the config -> special token whose id it has."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""
    """Tokens that the family's chat templates write around an image, beside those of its processor."""
    after: str = ""
    is_packed: bool = True


def _qwen(text: Mapping[str, Any], tower: Mapping[str, Any], **more: Any) -> VisionFamily:
    ids = {f"{name}_id": token for name, token in QWEN_TOKENS.items()}
    return VisionFamily(
        text={**TEXT, "head_dim": 8, "rope_parameters": MROPE, **text}, tower={**QWEN_TOWER, **tower},
        processor="Qwen3VLProcessor", images="Qwen2VLImageProcessor",
        image_settings={"patch_size": PATCH, "merge_size": 2, "size": PIXELS},
        videos="Qwen3VLVideoProcessor", tokens=QWEN_TOKENS, id_keys=ids,
        before=QWEN_TOKENS["vision_start_token"], after=QWEN_TOKENS["vision_end_token"], **more,
    )  # fmt: skip


def _idefics(name: str, **more: Any) -> VisionFamily:
    return VisionFamily(
        text={"model_type": "llama", **TEXT}, tower=TOWER, settings={"scale_factor": 2},
        processor=f"{name}Processor", processor_settings={"image_seq_len": 4}, images=f"{name}ImageProcessor",
        image_settings=IDEFICS_IMAGES, tokens={**IDEFICS_TOKENS, **TILE_TOKENS},
        id_keys={"image_token_id": "<image>"}, **more,
    )  # fmt: skip


DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
FAMILIES: Mapping[str, VisionFamily] = {
    "qwen3_vl": _qwen({}, DEEPSTACK),
    "qwen3_vl_moe": _qwen({"num_experts": 4, **EXPERTS}, DEEPSTACK),
    "qwen3_5": _qwen(
        {
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        {},
    ),
    "internvl": VisionFamily(
        text={"model_type": "qwen3", "head_dim": 8, **TEXT},
        tower={**TOWER, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        settings={"image_seq_length": 4},
        processor="InternVLProcessor", processor_settings={"image_seq_length": 4}, images="GotOcr2ImageProcessor",
        image_settings={"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 2},
        videos="InternVLVideoProcessor",
        tokens={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        id_keys={"image_token_id": "<IMG_CONTEXT>"},
    ),
    "glm4v_moe": VisionFamily(
        text={
            **TEXT, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        },
        tower={**QWEN_TOWER, "image_size": SIDE},
        processor="Glm4vProcessor", images="Glm4vImageProcessor",
        image_settings={
            "patch_size": PATCH, "merge_size": 2, "size": {name: 2 * pixels for name, pixels in PIXELS.items()},
        },
        videos="Glm4vVideoProcessor",
        tokens={
            "image_token": "<|image|>", "video_token": "<|video|>", "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>", "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
        id_keys={
            "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        before="<|begin_of_image|>", after="<|end_of_image|>",
    ),
    "mistral3": VisionFamily(
        text={"model_type": "mistral", "head_dim": 8, **TEXT},
        tower={**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 2 * SIDE},
        settings={"spatial_merge_size": 2},
        processor="PixtralProcessor", processor_settings={"patch_size": PATCH, "spatial_merge_size": 2},
        images="PixtralImageProcessor", image_settings={"size": {"longest_edge": 2 * SIDE}, "patch_size": PATCH},
        tokens={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        id_keys={"image_token_index": "[IMG]"},
    ),
    "smolvlm": _idefics("SmolVLM", videos="SmolVLMVideoProcessor"),
    "llava_onevision": VisionFamily(
        text={"model_type": "qwen2", **TEXT}, tower={**TOWER, "model_type": "siglip_vision_model"},
        settings={"image_grid_pinpoints": TILES, "vision_feature_layer": -1},
        processor="LlavaOnevisionProcessor",
        processor_settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        images="LlavaOnevisionImageProcessor", image_settings={"size": SQUARE, "image_grid_pinpoints": TILES},
        videos="LlavaOnevisionVideoProcessor",
        tokens={"image_token": "<image>", "video_token": "<video>"},
        id_keys={"image_token_index": "<image>", "video_token_index": "<video>"},
    ),
    "idefics3": _idefics("Idefics3"),
    "gemma3": VisionFamily(
        text={"head_dim": 8, **TEXT}, tower={**TOWER, "model_type": "siglip_vision_model"},
        settings={"mm_tokens_per_image": 4},
        processor="Gemma3Processor", processor_settings={"image_seq_length": 4}, images="Gemma3ImageProcessor",
        image_settings={"size": SQUARE},
        tokens={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        id_keys={
            "image_token_id": "<image_soft_token>", "boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>",
        },
        is_packed=False,
    ),
    "gemma4": VisionFamily(
        text={
            **TEXT, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": TEXT["vocab_size"], "use_bidirectional_attention": "vision",
            "layer_types": ["sliding_attention", "full_attention"],
        },
        tower={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": PATCH, "pooling_kernel_size": 2,
            "position_embedding_size": 512,
        },
        settings={"audio_config": None},
        processor="Gemma4Processor", images="Gemma4ImageProcessor",
        # The least number of tokens that it allows.
        image_settings={"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        videos="Gemma4VideoProcessor",
        tokens={
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        id_keys={"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
        is_packed=False,
    ),
}  # fmt: skip
"""Model type -> family of 2026 and how its tiny model is made. Qwen3.5's own text model alternates two kinds of layers."""
NEEDS_TORCHVISION = frozenset(name for name, family in FAMILIES.items() if family.videos is not None) | {"mistral3"}
"""Families whose processors have a part for videos, and those that transformers declares to need it."""
PACKED = [name for name, family in FAMILIES.items() if family.is_packed]


def save_family(name: str, folder: Path) -> Path:
    """Save a family's tiny model, without a parameter that is zero, and its own processor. Returns the folder."""
    processor = make_processor(name)
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make_config(name, processor.tokenizer))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
    model.save_pretrained(folder)
    return folder


def make_config(name: str, tokenizer: Any) -> Any:
    family = FAMILIES[name]
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in family.id_keys.items()}
    own = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    return AutoConfig.for_model(
        name, text_config={**family.text, **own}, vision_config={**family.tower}, **ids, **family.settings
    )


def make_processor(name: str) -> Any:
    """Return the family's own processor, with a trained tokenizer and a chat template that shows images."""
    family = FAMILIES[name]
    tokenizer = train_tokenizer(WORDS * 4, TEXT["vocab_size"] - len(family.tokens) - 8)
    tokenizer.add_tokens([*family.tokens.values()], special_tokens=True)
    set_special_tokens(tokenizer, dict(family.tokens))
    parts: dict[str, Any] = {"tokenizer": tokenizer, "image_processor": _image_processor(family)}
    if family.videos is not None:
        parts["video_processor"] = getattr(transformers, family.videos)()
    if name == "gemma4":
        parts["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    made = getattr(transformers, family.processor)(**parts, **family.processor_settings)
    made.chat_template = tokenizer.chat_template = chat_template(family, made)
    return made


def _image_processor(family: VisionFamily) -> Any:
    backend = "" if is_torchvision_available() else "Pil"
    return getattr(transformers, f"{family.images}{backend}")(**family.image_settings)


def chat_template(family: VisionFamily, processor: Any) -> str:
    image = f"{family.before}{processor.image_token}{family.after}"
    return (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
        "{% if part.type == 'image' %}" + image + "{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
