"""Greedy answers of an exported folder in plain transformers, compared with those of `dstrain generate`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dstrain.data.encoding.chat_template import to_template_messages, write_time
from dstrain.data.encoding.conversations import EncodedPrompt, encode_image_prompts, encode_prompts
from dstrain.data.vision.images import read_image
from dstrain.data.vision.processor import VisionProcessor
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import BadRecord, CheckpointError
from dstrain.models.attention.model_types import needs_equal_prompt_lengths
from dstrain.models.checks import max_positions
from dstrain.models.router_loss import router_logits_disabled
from dstrain.models.weights import disable_transformers_logging
from dstrain.tasks import Task
from dstrain.tasks.common.generation import PromptReader
from dstrain.tasks.common.model_source import ModelSource
from dstrain.training.generate import GenerationModel, SamplingParams, generate_answers
from dstrain.training.generation_config import GENERATION_CONFIG_FILE, collect_stop_ids

PROBE_TEXTS = ("Hello", "What is there in the sea, and what is there on the land?")
"""Of unequal lengths, so that one is padded."""
MAX_NEW_TOKENS = 12
"""Few: a token takes as long as reading the weights of a large model twice."""
LARGE_IMAGE = (1600, 1200)
"""Size of an image that a limit of pixels would make smaller; it is only counted."""
TIE = 10.0
"""Two tokens are equally likely where their scores differ by less than this times the tolerance of the outputs."""


@dataclass(frozen=True)
class ProbeAnswers:
    """Prompts, and what the run's model answers to them in `dstrain generate`."""

    source: ModelSource
    """The model that answered."""
    prompts: Sequence[EncodedPrompt]
    answers: Sequence[Sequence[int]]
    """Ids without the one that ended the answer."""
    max_new_tokens: int
    stop_ids: frozenset[int]

    def is_ended(self, index: int) -> bool:
        """Return True where the answer has come to its end."""
        return len(self.answers[index]) < self.max_new_tokens


def answer_probes(task: Task, model: Any) -> ProbeAnswers | None:
    """Return the answers of a model in memory to the probe prompts; None where the task's model writes no text."""
    from transformers import PreTrainedModel

    source = task.model_source
    if source is None or not source.can_generate or not isinstance(model, PreTrainedModel):
        return None
    positions = max_positions(model, source.config)
    num_new = MAX_NEW_TOKENS if positions is None else min(MAX_NEW_TOKENS, positions // 2)
    limit, processor = None if positions is None else positions - num_new, source.vision_processor
    read = [PromptReader(task).parse(record) for record in _probe_records(processor is not None)]
    # Through the template, also where data.rendered says that the run's texts have been through it.
    if processor is None:
        encoded = encode_prompts(source.tokenizer, [one.parsed for one in read], limit, rendered_texts=False)
    else:
        encoded = encode_image_prompts(processor, read, [Path()] * len(read), limit, False)
    # Some templates want more than a question; a text that the tokenizer does not know becomes no token.
    prompts = [prompt for prompt in encoded if not isinstance(prompt, BadRecord)]
    answers: list[list[int]] = []
    engine = GenerationModel(model, SingleProcessWorld(), is_sharded=False)
    for group in _group_prompts(prompts, model.config):
        sampling = SamplingParams(max_new_tokens=num_new, batch=len(group))
        answers += generate_answers(engine, group, sampling, source.tokenizer, processor)
    stops = frozenset(collect_stop_ids(model.generation_config, source.tokenizer))
    return ProbeAnswers(source, prompts, answers, num_new, stops)


def _probe_records(with_image: bool) -> Iterator[Mapping[str, Any]]:
    yield from ({"prompt": [{"role": "user", "content": text}]} for text in PROBE_TEXTS)
    if with_image:
        asked = [{"role": "user", "content": f"<image>{PROBE_TEXTS[0]}"}]
        yield {"prompt": asked, "images": [{"bytes": _make_probe_image()}]}


def _make_probe_image() -> bytes:
    """Return a small image of a color gradient, as PNG."""
    from PIL import Image

    made, file = Image.linear_gradient("L").resize((96, 64)).convert("RGB"), io.BytesIO()
    made.save(file, "PNG")
    return file.getvalue()


def _group_prompts(prompts: Sequence[EncodedPrompt], config: Any) -> list[list[EncodedPrompt]]:
    """Return the prompts in batches, in order: texts together, images alone."""
    texts = [prompt for prompt in prompts if not prompt.images]
    alone = needs_equal_prompt_lengths(config)
    groups = [[prompt] for prompt in texts] if alone else [texts] if texts else []
    return groups + [[prompt] for prompt in prompts if prompt.images]


@torch.no_grad()
def check_answers(expected: ProbeAnswers, folder: Path, model: Any, tolerance: float) -> None:
    """Compare what plain transformers makes of an exported folder with the run's answers. Raises CheckpointError.

    `model`: loaded from the folder, in evaluation mode. Tokenizer, template, processor and generation config are read
    from the folder again; of greedy decoding nothing is set but its name and the number of tokens.
    """
    from transformers import GenerationConfig

    # The config of an adapter folder's base may ask for router logits, with which transformers cannot generate.
    is_adapter = (folder / "adapter_config.json").is_file()
    quiet = router_logits_disabled(model) if is_adapter else nullcontext()
    with disable_transformers_logging(warnings=True), quiet:
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
        named = collect_config_stops(model.generation_config)
        if named != expected.stop_ids:
            problem = (
                f"{GENERATION_CONFIG_FILE} ends answers at {sorted(named)}, dstrain at {sorted(expected.stop_ids)}"
            )
            raise CheckpointError(f"{problem}; nothing was written")
        reader = _FolderReader(expected.source, folder)
        reader.check_images()
        at = 0
        for group in _group_prompts(expected.prompts, model.config):
            inputs = reader.read(group)
            written = model.generate(**inputs, max_new_tokens=expected.max_new_tokens, do_sample=False, num_beams=1)
            for row in written[:, inputs["input_ids"].shape[1] :].tolist():
                _check_answer(
                    expected, at, row, model, inputs if len(group) == 1 else reader.read([group[at]]), tolerance
                )
                at += 1


def collect_config_stops(config: Any) -> frozenset[int]:
    """Return the ids at which transformers ends an answer with this generation config."""
    listed = config.eos_token_id
    values = listed if isinstance(listed, list) else [listed]
    return frozenset(int(token) for token in values if token is not None)


def _check_answer(
    expected: ProbeAnswers, index: int, row: Sequence[int], model: Any, inputs: Mapping[str, Any], tolerance: float
) -> None:
    """Compare an answer, and whether it ended. Raises CheckpointError."""
    mine, prompt = list(expected.answers[index]), expected.prompts[index]
    end = next((at for at, token in enumerate(row) if token in expected.stop_ids), len(row))
    theirs, is_ended = list(row[:end]), end < len(row)
    if theirs == mine and is_ended == expected.is_ended(index):
        return
    same = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(mine), len(theirs)) if same is None else same
    if _is_tie(model, inputs, mine[:same], mine[same : same + 1] or sorted(expected.stop_ids), tolerance):
        return
    decode = expected.source.tokenizer.decode
    ends = ["is cut off", "ends"]
    raise CheckpointError(
        f"plain transformers does not answer as dstrain does. To {prompt.text!r} the exported folder writes "
        f"{decode(theirs)!r} and {ends[is_ended]}, the run's model {decode(mine)!r} and "
        f"{ends[expected.is_ended(index)]}; nothing was written"
    )


def _is_tie(model: Any, inputs: Mapping[str, Any], begun: list[int], wanted: Sequence[int], tolerance: float) -> bool:
    """Return True where one of the wanted tokens comes next with a score that only rounding parts from the best.

    Merged adapters give other sums than adapters beside their base.
    """
    added = torch.tensor([begun], dtype=torch.long)
    longer = dict(inputs)
    longer["input_ids"] = torch.cat([inputs["input_ids"], added], dim=1)
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(added)], dim=1)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in longer:
            longer[name] = torch.cat([longer[name], torch.zeros_like(added)], dim=1)
    settings = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1}
    step = model.generate(**longer, **settings, output_scores=True, return_dict_in_generate=True)
    scores = step.scores[0][0].double()
    best = float(scores.max())
    return best - float(scores[list(wanted)].max()) <= TIE * tolerance * max(1.0, abs(best))


class _FolderReader:
    """Makes a model's inputs of prompts with the tokenizer or processor of an exported folder, as its users would."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        from transformers import AutoProcessor, AutoTokenizer

        self._source = source
        self._processor = AutoProcessor.from_pretrained(str(folder)) if source.vision_processor else None
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder))

    def check_images(self) -> None:
        """Raise CheckpointError where the folder's processor gives a large image other tokens than the run's does."""
        own = self._source.vision_processor
        if own is None:
            return
        counts = [
            processor.count_in_text(processor.get_image_text(LARGE_IMAGE))
            for processor in (own, VisionProcessor(self._processor))
        ]
        if counts[0] != counts[1]:
            raise CheckpointError(
                f"the exported processor gives an image of {LARGE_IMAGE[0]}x{LARGE_IMAGE[1]} pixels {counts[1]} tokens, "
                f"the run's {counts[0]}; nothing was written"
            )

    def read(self, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
        """Return the inputs of a batch. Raises CheckpointError where the folder's files give other ids than dstrain."""
        inputs = self._read_images(prompts[0]) if prompts[0].images else self._read_texts(prompts)
        if not bool(inputs["attention_mask"][:, -1].all()):
            problem = "the exported tokenizer pads prompts on the right, where an answer begins"
            raise CheckpointError(f"{problem}; nothing was written")
        for prompt, ids, mask in zip(prompts, inputs["input_ids"], inputs["attention_mask"], strict=True):
            if ids[mask.bool()].tolist() != prompt.ids:
                decode = self._tokenizer.decode
                raise CheckpointError(
                    f"the exported tokenizer writes a prompt as {decode(ids[mask.bool()])!r}, the run's as "
                    f"{decode(prompt.ids)!r}; nothing was written"
                )
        return inputs

    def _read_texts(self, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
        if self._tokenizer.chat_template is None or any(prompt.is_cut for prompt in prompts):
            # Without a template a folder does not say how a prompt is written: the model card does.
            made = self._tokenizer.pad({"input_ids": [prompt.ids for prompt in prompts]}, return_tensors="pt")
        else:
            made = self._tokenizer.apply_chat_template(
                [self._to_conversation(prompt) for prompt in prompts],
                # A template that asks for the time is asked at that of the run.
                chat_template=write_time(self._source.tokenizer, self._tokenizer.get_chat_template()),
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
        return {name: made[name] for name in ("input_ids", "attention_mask")}

    def _to_conversation(self, prompt: EncodedPrompt) -> list[Any]:
        assert not isinstance(prompt.prompt, str), "probes are dialogs"
        return [*to_template_messages(self._tokenizer, prompt.prompt)]

    def _read_images(self, prompt: EncodedPrompt) -> dict[str, Any]:
        assert self._processor is not None
        images = [read_image(image) for image in prompt.images]
        has_template = self._tokenizer.chat_template is not None
        return dict(
            self._processor(text=[prompt.text], images=images, add_special_tokens=not has_template, return_tensors="pt")
        )
