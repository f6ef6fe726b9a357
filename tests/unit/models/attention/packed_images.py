"""Tiny vision-language models, packed batches with images, and the same sequences as padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from dstrain.batch import Batch
from dstrain.data.loading.rows import PackedRows, PaddedRows, pack_rows
from dstrain.data.vision.processor import VisionProcessor
from dstrain.models.attention.packed import packed_model_kwargs
from dstrain.models.reward_model import AutoRewardModel
from dstrain.tasks.common.forward import forward_logits, vision_inputs
from tests.unit.data.vision.test_processor import made_from
from tests.unit.models.test_qwen import TOKENS, config_for
from tests.unit.models.test_qwen import processor as qwen_processor
from tests.vision_recipes import IDEFICS3, TEXT, llava, picture

QWEN2_TOWER = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
LLAVAS = {
    **{name: llava(text_config={"model_type": name, **TEXT}) for name in ("llama", "mistral", "qwen2")},
    "mistral with windows": llava(text_config={"model_type": "mistral", "sliding_window": 12, **TEXT}),
    "llama with a SigLIP tower": llava("siglip_vision_model", "full"),
}
KINDS = [*(f"llava, {name}" for name in LLAVAS), "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl"]
TEXTS = ["what is 0 it? 1 a fox", "what is 0 it? 1 a dog, a fox, a dog", "what?", "a 2 fox", "a fox 0 2", "a dog 0 2"]
SHARED = [[0, 1], [2], [3], [4, 5]]
"""A pair whose images are in its beginning, samples without and with an image, and a pair with images behind it."""
APART = [[row] for row in range(len(TEXTS))]
CASES = {
    "shared": (TEXTS, SHARED),
    "apart": (TEXTS, APART),
    "no images": (["what is it? a", "what is it? b"], [[0, 1]]),
}


def config_and_processor(kind: str) -> tuple[PretrainedConfig, VisionProcessor]:
    """Return the config of one of KINDS, and its processor."""
    family, _, text = kind.partition(", ")
    if family.startswith("qwen"):
        processor = VisionProcessor(qwen_processor())
        config = config_for(processor.tokenizer)
        return (config if family == "qwen2_5_vl" else _as_qwen2(config)), processor
    config, processor = made_from(LLAVAS[text] if text else IDEFICS3)
    if family == "smolvlm":  # its processor, which reads videos too, gives the same tensors of images
        values = config.to_dict() | {"model_type": "smolvlm"}
        values["vision_config"]["model_type"] = "smolvlm_vision"
        config = AutoConfig.for_model(**values)
    return config, processor


def _as_qwen2(config: Any) -> PretrainedConfig:
    values = config.to_dict()
    own = {**values.pop("text_config"), "model_type": "qwen2_vl_text"}
    ids = {name: values[name] for name in values if name.endswith("token_id")}
    return AutoConfig.for_model("qwen2_vl", text_config=own, vision_config=QWEN2_TOWER, **ids)


@dataclass(frozen=True)
class Forms:
    """The same sequences and images in a packed row and in padded rows."""

    packed: Batch
    padded: Batch
    rows: PackedRows

    def padded_places(self) -> torch.Tensor:
        """Return where each token of the packed row, without dummy groups, is found in the padded rows, (T,)."""
        length = self.padded.tensors["input_ids"].shape[1]
        places = np.empty(self.rows.num_tokens, dtype=np.int64)
        for row, indices in enumerate(self.rows.indices):
            places[indices] = row * length + np.arange(len(indices))
        return torch.from_numpy(places)


def forms(
    processor: VisionProcessor,
    texts: Sequence[str],
    groups: Sequence[Sequence[int]],
    around: tuple[str, str] | None = None,
) -> Forms:
    """Return texts in both forms; a digit stands for that image.

    `around`: tokens that the family's chat templates write before and after an image.
    """
    pictures = {str(seed): picture(seed, size) for seed, size in enumerate([(24, 16), (16, 32), (40, 40)])}
    if around is None:
        around = (TOKENS["start"], TOKENS["end"]) if processor.image_token == TOKENS["image"] else ("", "")
    shown = {key: processor.get_image_text(image.size).join(around) for key, image in pictures.items()}
    sequences = [
        np.array(processor.tokenizer("".join(shown.get(char, char) for char in text))["input_ids"]) for text in texts
    ]
    packed = pack_rows(sequences, groups, processor.image_token_ids)
    padded = PaddedRows(sequences, processor.tokenizer.pad_token_id)
    common: dict[str, Any] = {"weight": 1.0, "samples": (0,)}
    images = [pictures[char] for text in texts for char in text if char in pictures]
    once = [
        pictures[char]
        for members, group in zip(groups, packed.groups, strict=True)
        for row in members[: 1 if group.prefix else None]
        for char in texts[row]
        if char in pictures
    ]
    return Forms(
        processor.attach_images(Batch(tensors=packed.input_tensors(), groups=packed.groups, **common), once),
        processor.attach_images(Batch(tensors=padded.input_tensors(), **common), images),
        packed,
    )


def made(config: PretrainedConfig, is_reward_model: bool = False) -> PreTrainedModel:
    """Return a tiny model in which no parameter is zero."""
    torch.manual_seed(0)
    if is_reward_model:
        config.num_labels = 1
    auto: Any = AutoRewardModel if is_reward_model else AutoModelForImageTextToText
    model = auto.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
    return model


def padded_logits(model: torch.nn.Module, found: Forms) -> torch.Tensor:
    """Return the logits of the packed row's tokens, computed in padded rows; (T, V)."""
    return forward_logits(model, found.padded, use_cache=False).flatten(0, 1)[found.padded_places()]


def packed_logits(model: torch.nn.Module, found: Forms) -> torch.Tensor:
    """Return the logits of the packed row, without those of dummy groups; (T, V)."""
    batch = found.packed
    inputs = {**packed_model_kwargs(batch), **vision_inputs(model, batch), "use_cache": False}
    return model(input_ids=batch.tensors["input_ids"], **inputs).logits[0, : found.rows.num_tokens]
