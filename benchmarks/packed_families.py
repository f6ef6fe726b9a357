"""Which types of transformers take packed batches with shared prompts, and how far these are from single rows.

    python -m benchmarks.packed_families --to docs/measurements/packed-families.md [--types llama,qwen3_vl]

Of each type of causal and of image-text models a small one is built from its default config. It reads a row of two
answers with a shared prompt and of two more sequences, packed where dstrain packs it and padded otherwise, and each
sequence alone, in fp64. Images come in as random features in place of the vision tower's: towers read images one by
one, so that only the text model and its wrapper have to keep sequences apart.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import format_certificate, table, write_table
from benchmarks.kernel_families import time_limit
from dstrain.batch import Batch, PackedGroup
from dstrain.data.vision.processor import packed_rope_positions
from dstrain.models.attention.model_types import needs_equal_prompt_lengths, needs_no_mask
from dstrain.models.attention.packed import enable_packed_attention, packed_model_kwargs, packing_unsupported_reason
from dstrain.models.folder import NON_CAUSAL_TYPES, is_bidirectional
from dstrain.verify.shrink import shrink_config

SECONDS = 120
VOCABULARY, IMAGE_TOKEN = 320, 300
EXACT, SINGLE = 1e-6, 1e-5
"""Greatest difference in fp64, and of models that compute in fp32 whatever the weights are."""
MADE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "num_hidden_layers": 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 4},
}
"""Type -> settings without which its default config makes no model."""


@dataclass(frozen=True)
class Outcome:
    """What became of a type."""

    state: str
    """packed, padded, refused, WRONG or not built."""
    difference: float | None = None
    """Greatest difference of a logit from those of single rows."""
    gradient: float | None = None
    """Norm of the difference of the gradients of all weights, relative to that of single rows."""
    left: float | None = None
    """Greatest difference of a last logit of rows padded on the left."""
    reason: str = ""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a row: a prompt with two answers, and two more."""

    prompt: torch.Tensor
    answers: tuple[torch.Tensor, torch.Tensor]
    others: tuple[torch.Tensor, torch.Tensor]

    @property
    def rows(self) -> list[torch.Tensor]:
        return [*(torch.cat([self.prompt, answer]) for answer in self.answers), *self.others]

    @property
    def groups(self) -> tuple[PackedGroup, ...]:
        first = PackedGroup(len(self.prompt), (len(self.answers[0]), len(self.answers[1])))
        return first, *(PackedGroup(0, (len(other),)) for other in self.others)

    @property
    def packed(self) -> torch.Tensor:
        return torch.cat([self.prompt, *self.answers, *self.others])

    def from_rows(self, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logits of the packed tokens, (T, V), of those of each row."""
        return torch.cat([logits[0], logits[1][len(self.prompt) :], logits[2], logits[3]])


def make_sequences(with_images: bool) -> Sequences:
    random = torch.Generator().manual_seed(3)

    def text(length: int) -> torch.Tensor:
        return torch.randint(5, 290, (length,), generator=random)

    image = torch.full((4,), IMAGE_TOKEN)
    if not with_images:
        return Sequences(text(23), (text(18), text(19)), (text(60), text(1)))
    return Sequences(
        torch.cat([text(5), image, text(7)]), (text(9), torch.cat([text(3), image, text(4)])),
        (torch.cat([image, text(20)]), text(15)),
    )  # fmt: skip


class Reader:
    """A small model that reads rows; images are random features, in the order of the packed row."""

    def __init__(self, model: Any, with_images: bool) -> None:
        self.model, self.with_images = model, with_images
        self.dtype = next(model.parameters()).dtype
        width = model.config.get_text_config().hidden_size if with_images else 1
        random = torch.Generator().manual_seed(5)
        self.features = (0.5 * torch.randn(3, 4, width, dtype=torch.float64, generator=random)).to(self.dtype)
        self.form = "list"
        core = getattr(model, "model", model)
        self.parameters = {*inspect.signature(type(model).forward).parameters}
        self.parameters |= {*inspect.signature(type(core).forward).parameters}
        self.counts_by_patches = hasattr(core, "get_rope_index")
        tower = getattr(model.config, "vision_config", None)
        self.merge = int(getattr(tower, "spatial_merge_size", 2) or 2)
        self.layers_with_images = len(getattr(getattr(core, "visual", None), "deepstack_visual_indexes", [0]))

    def __call__(self, ids: torch.Tensor, images: Sequence[int], **more: Any) -> torch.Tensor:
        """Return the logits of a row, (L, V), or of rows, (R, L, V). `images`: numbers of the features of their images."""
        inputs: dict[str, Any] = {"input_ids": ids if ids.ndim == 2 else ids[None], "use_cache": False}
        if self.with_images:
            features = [self.features[number] for number in images]
            for owner in (self.model, self.model.model):
                owner.get_image_features = lambda *_args, **_kwargs: self._outputs(features)
            for name in ("mm_token_type_ids", "token_type_ids"):
                if name in self.parameters:
                    inputs[name] = (inputs["input_ids"] == IMAGE_TOKEN).long()
        if images:
            inputs["pixel_values"] = torch.zeros(len(images), 3, 8, 8, dtype=self.dtype)
            more_inputs = {
                "image_grid_thw": torch.tensor([[1, 2 * self.merge, 2 * self.merge]] * len(images)),
                "image_sizes": torch.tensor([[8, 8]] * len(images)),
                "high_res_pixel_values": inputs["pixel_values"],
            }
            inputs |= {name: value for name, value in more_inputs.items() if name in self.parameters}
        logits = self.model(**inputs, **more).logits
        return logits if ids.ndim == 2 else logits[0]

    def _outputs(self, features: list[torch.Tensor]) -> Any:
        forms = {"list": features, "joined": torch.cat(features), "stacked": torch.stack(features)}
        outputs = _ImageOutputs(pooler_output=forms[self.form], last_hidden_state=forms[self.form])
        outputs["deepstack_features"] = [
            [0.3 * feature for feature in features] for _ in range(self.layers_with_images)
        ]
        outputs["visual_indicator_features"] = None
        outputs["router_logits"] = None
        return outputs

    def choose_form(self, ids: torch.Tensor, images: Sequence[int]) -> None:
        """Find the form in which the family's tower returns the features of images."""
        first_error: Exception | None = None
        for form in ("list", "joined", "stacked"):
            self.form = form
            try:
                self(ids, images)
                return
            except Exception as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error


class _ImageOutputs(dict[str, Any]):
    """The output of a tower, by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def build(config: Any, auto: Any, dtype: torch.dtype) -> Any:
    """Return a small model in which no weight is zero."""
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    model = model.to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products take no fp64
    return model


def make_config(model_type: str, auto: Any, with_images: bool) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **MADE.get(model_type, {}))
    text = config.get_text_config()
    if with_images and isinstance(getattr(text, "rope_parameters", None), dict):
        text.rope_parameters.setdefault("mrope_section", [16, 24, 24])
    config = shrink_config(config, auto, VOCABULARY)
    if hasattr(config.get_text_config(), "index_topk"):  # all tokens: indices of small models have ties
        config.get_text_config().index_topk = 128
    if with_images:
        _number_tokens(config)
    return config


def _number_tokens(config: Any) -> None:
    """Give images a token of their own, which the small vocabulary has."""
    number = IMAGE_TOKEN + 1
    for part in (config, config.get_text_config()):
        for name in [name for name in vars(part) if name.endswith(("token_id", "token_index", "patch_id"))]:
            if "image" in name:
                setattr(part, name, IMAGE_TOKEN)
            elif isinstance(getattr(part, name), int):
                setattr(part, name, number)
                number = min(number + 1, VOCABULARY - 1)


def gradient(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss that weighs each logit differently; all weights in one vector."""
    model.zero_grad(set_to_none=True)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).to(logits.dtype)
    (logits * weights).sum().backward()
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def positions_of(sequences: Sequences, reader: Reader) -> torch.Tensor:
    """Return the positions of the packed row: (1, T), or (3, 1, T) where a family counts them by patches."""
    if reader.with_images and reader.counts_by_patches:
        is_image = (sequences.packed == IMAGE_TOKEN).numpy()
        return torch.from_numpy(packed_rope_positions(is_image, sequences.groups, [(1, 2, 2)] * 3))[:, None]
    prompt = len(sequences.prompt)
    parts = [torch.arange(prompt), *(torch.arange(prompt, prompt + len(answer)) for answer in sequences.answers)]
    return torch.cat([*parts, *(torch.arange(len(other)) for other in sequences.others)])[None]


def compare(model_type: str, auto: Any, with_images: bool, dtype: torch.dtype = torch.float64) -> Outcome:
    """Return how far packed or padded rows of a type are from single rows."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **MADE.get(model_type, {}))
    if config.is_encoder_decoder or config.model_type in NON_CAUSAL_TYPES:
        return Outcome("refused", reason="not a causal decoder")
    if is_bidirectional(config.model_type, getattr(config, "is_decoder", None)):
        return Outcome("refused", reason="attends in both directions")
    reason = packing_unsupported_reason(config, shares_prefixes=True)
    reader = Reader(build(make_config(model_type, auto, with_images), auto, dtype), with_images)
    sequences = make_sequences(with_images)
    images = [[0], [0, 1], [2], []] if with_images else [[], [], [], []]
    if with_images:
        reader.choose_form(sequences.rows[0], images[0])
    singles = [reader(row, shown) for row, shown in zip(sequences.rows, images, strict=True)]
    expected = sequences.from_rows(singles)
    if with_images:
        reader.features *= 2
        if float((reader(sequences.rows[0], images[0]) - singles[0]).abs().max()) < EXACT:
            return Outcome("not built", reason="features of images do not reach the text model")
        reader.features /= 2
    left = None if with_images else left_difference(reader, sequences.rows, singles)
    reads_padding = left is not None and left > SINGLE and not needs_equal_prompt_lengths(config)
    wanted = gradient(reader.model, expected)
    if reason is not None:
        difference = right_difference(reader, sequences.rows, singles)
        is_equal = difference <= SINGLE and not reads_padding
        return Outcome("padded" if is_equal else "WRONG", difference, None, left, reason)
    unmasked = right_difference(reader, sequences.rows, singles, with_mask=False) if needs_no_mask(config) else 0.0
    enable_packed_attention(reader.model)
    tensors = {"input_ids": sequences.packed[None], "position_ids": positions_of(sequences, reader)}
    batch = Batch(tensors=tensors, weight=1.0, samples=(), groups=sequences.groups)
    logits = reader(sequences.packed, [0, 1, 2] if with_images else [], **packed_model_kwargs(batch))
    difference = float((logits - expected).detach().abs().max())
    apart = float((gradient(reader.model, logits) - wanted).norm() / wanted.norm())
    is_equal = max(difference, apart, unmasked) <= SINGLE and not reads_padding
    return Outcome("packed" if is_equal else "WRONG", difference, apart, left)


@torch.no_grad()
def right_difference(
    reader: Reader, rows: Sequence[torch.Tensor], singles: Sequence[torch.Tensor], with_mask: bool = True
) -> float:
    """Return the greatest difference of a logit of rows that are padded on the right."""
    ids, mask = pad_rows(rows, left=False)
    more = {"attention_mask": mask} if with_mask else {}
    logits = reader(ids, [0, 0, 1, 2] if reader.with_images else [], **more)
    return max(float((logits[row, : len(single)] - single).abs().max()) for row, single in enumerate(singles))


@torch.no_grad()
def left_difference(reader: Reader, rows: Sequence[torch.Tensor], singles: Sequence[torch.Tensor]) -> float | None:
    """Return the greatest difference of the last logit of rows padded on the left; None where the model takes none."""
    ids, mask = pad_rows(rows, left=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    more = {"position_ids": positions} if "position_ids" in reader.parameters else {}
    try:
        logits = reader.model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    except Exception:  # of a family that takes no such mask
        return None
    return max(float((logits[row, -1] - single[-1]).abs().max()) for row, single in enumerate(singles))


def pad_rows(rows: Sequence[torch.Tensor], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, (R, L) each."""
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask


def list_types(with_images: bool) -> Iterator[tuple[str, Any]]:
    """Yield the types of causal or of image-text models, with the class that builds one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    names = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if with_images
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    for name in sorted(names):
        yield name, AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def try_type(model_type: str, auto: Any, with_images: bool) -> Outcome:
    try:
        with time_limit(SECONDS):
            try:
                return compare(model_type, auto, with_images)
            except RuntimeError:  # of a family whose code takes no fp64
                return compare(model_type, auto, with_images, torch.float32)
    except Exception as error:  # of the family's code, with settings that are not its own
        return Outcome("not built", reason=f"{type(error).__name__}: {error}".replace("\n", " ")[:160])


def describe(model_type: str, outcome: Outcome) -> dict[str, Any]:
    """Return the row of a type in the table."""
    figures = {"logits": outcome.difference, "gradients": outcome.gradient, "padded on the left": outcome.left}
    shown = {name: "" if value is None else f"{value:.0e}" for name, value in figures.items()}
    return {"type": model_type, "batches": outcome.state, **shown, "reason": outcome.reason.replace("|", "/")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    parser.add_argument("--types", default=None, help="only these, separated by commas")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # small matrices
    wanted = None if options.types is None else options.types.split(",")
    parts = [format_certificate()]
    for with_images in (False, True):
        outcomes: dict[str, Outcome] = {}
        for model_type, auto in list_types(with_images):
            if wanted is None or model_type in wanted:
                outcomes[model_type] = try_type(model_type, auto, with_images)
                print(model_type, outcomes[model_type], flush=True)
        if outcomes:
            parts.append(summarize("image-text" if with_images else "causal", outcomes))
    write_table("\n\n".join(parts), "benchmarks.packed_families", options.to)


def summarize(kind: str, outcomes: dict[str, Outcome]) -> str:
    """Return the section of the page about all types of a kind."""
    states = ("packed", "padded", "refused", "WRONG", "not built")
    counts = {state: [name for name, outcome in outcomes.items() if outcome.state == state] for state in states}
    title = f"## {len(outcomes)} {kind} types"
    numbers = ", ".join(f"{len(names)} {state}" for state, names in counts.items())
    refused = textwrap.fill(f"Refused: {', '.join(counts['refused']) or 'none'}.", 120, break_on_hyphens=False)
    rows = [describe(name, outcome) for name, outcome in outcomes.items() if outcome.state != "refused"]
    return f"{title}\n\n{numbers}.\n\n{table(rows)}\n\n{refused}"


if __name__ == "__main__":
    main()
