"""dstrain generate: answers of a trained policy to prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.run_job import Job
from dstrain.commands.trained_model import (
    LoadedModel,
    ModelSelector,
    SavedModel,
    hash_weights,
    load_saved_model,
    quiet_libraries,
    resolve_data_path,
)
from dstrain.config import RunConfig
from dstrain.data.encoding.conversations import EncodedPrompt
from dstrain.data.encoding.template_check import TEMPLATE_COLUMNS
from dstrain.data.formats.answers import COMPLETIONS
from dstrain.data.formats.conversations import ParsedPrompt
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.prepare import PreparePolicy, check_bad_records, describe_template_counts, iter_encoded
from dstrain.data.records import EncodeResult, encode_valid, parse_record, try_parse
from dstrain.data.sources.base import Source
from dstrain.data.token_store import BuildReport
from dstrain.ds_config import Device
from dstrain.errors import BadRecord, DataError, TaskError, UsageError
from dstrain.process_setup import log_stderr
from dstrain.tasks.common.generation import PromptReader
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    from dstrain.distributed.world import World


@dataclass(frozen=True)
class PreparedGeneration:
    """A model and the encoded prompts that it answers."""

    saved_model: SavedModel
    prompts: Sequence[EncodedPrompt]
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerateJob(Job):
    """A job that generates an answer to each prompt, in order."""

    selector: ModelSelector
    texts: Sequence[str] = ()
    """Prompts from the command line."""
    data: str | None = None
    """A file, or a dataset on the hub, with a prompt in each record."""
    images: Sequence[str] = ()
    """Image files for the prompts of the command line."""
    sampling: Mapping[str, Any]
    """The fields of `dstrain.training.generate.SamplingParams`."""

    @property
    def num_samples(self) -> int:
        """Answers to each prompt."""
        return int(self.sampling.get("num_samples", 1))

    def to_argv(self) -> list[str]:
        words = ["generate", *self.selector.to_argv(), *(word for text in self.texts for word in ("--prompt", text))]
        words += ["--data", resolve_data_path(self.data)] if self.data else []
        words += [word for image in self.images for word in ("--image", os.path.realpath(Path(image).expanduser()))]
        options = {f"--{name.replace('_', '-')}": str(value) for name, value in self.sampling.items()}
        return words + [word for option in options.items() for word in option]

    def check_recipe(self) -> RunConfig:
        if not self.texts and not self.data:
            raise UsageError("no prompt: give --prompt TEXT, or --data FILE with prompts")
        if any(not text.strip() for text in self.texts):
            raise UsageError("--prompt is empty; write a prompt")
        if self.num_samples > 1 and not self.sampling.get("temperature"):
            raise UsageError("--num-samples: without a temperature all answers are equal; add --temperature 1")
        if self.images and not self.texts:
            raise UsageError("--image needs a --prompt; give one, or write image and question into a --data file")
        found = self._find_model()
        source = get_text_task(found).model_source
        if self.images and not source.is_multimodal:
            kind = source.config.model_type
            raise UsageError(f"--image: {kind} is a text-only model; leave the option out")
        for text in self.texts:
            self._parse_prompt(get_text_task(found), text)
        return found.task.recipe

    def _find_model(self) -> SavedModel:
        found = self.selector.find_model(self.data)
        get_text_task(found)
        return found

    def prepare(self, world_size: int, device: Device) -> PreparedGeneration:
        quiet_libraries()
        found = self._find_model()
        task = get_text_task(found)
        found.check_loadable()
        limit = max_prompt_tokens(task, self.sampling.get("max_new_tokens", 0))
        asked = [self._parse_prompt(task, text) for text in self.texts]
        encoded = PromptReader(task, limit).encode(asked, [Path.cwd()] * len(asked))
        prompts = [check_prompt(item, "--prompt") for item in encoded]
        prompts += _read_prompts(task, limit) if self.data else []
        for line in describe_changes(prompts, limit):
            log_stderr(line)
        if self.num_samples > 1 and any(prompt.images or prompt.soft_inputs for prompt in prompts):
            raise DataError("--num-samples: several answers are written for prompts of text only; remove the images")
        return PreparedGeneration(found, prompts, found.build_ds_config(self.selector.ds_config, world_size, device))

    def cache_weight_hashes(self, prepared: PreparedGeneration) -> None:
        hash_weights(prepared.saved_model.task, prepared.saved_model.checkpoint is not None)

    def run(self, prepared: PreparedGeneration, world: World) -> list[dict[str, Any]]:
        from dstrain.models.params import unwrap_peft
        from dstrain.training.engine.base import ForwardEngine
        from dstrain.training.generate import SamplingParams, generate_answers

        task = get_text_task(prepared.saved_model)
        model = load_saved_model(prepared.saved_model, prepared.ds_config, world)
        engine = ForwardEngine(unwrap_peft(model), prepared.ds_config, world)
        count = self.num_samples
        prompts = [prompt for prompt in prepared.prompts for _ in range(count)]
        answers = generate_answers(
            engine,
            prompts,
            SamplingParams(**self.sampling),
            task.tokenizer,
            task.model_source.vision_processor,
        )
        limit = int(self.sampling["max_new_tokens"])
        if world.rank == 0 and (cut := sum(len(answer) == limit for answer in answers)):
            log_stderr(f"{cut} of {len(answers)} answers are cut off after --max-new-tokens {limit}")
        texts = task.tokenizer.batch_decode(answers, skip_special_tokens=True)
        if count == 1:
            return [
                {"prompt": prompt.text, "answer": text, "tokens": len(answer)}
                for prompt, answer, text in zip(prompts, answers, texts, strict=True)
            ]
        lengths = [len(answer) for answer in answers]
        return [
            # The prompt as a record has it, so that `dstrain score` reads the line.
            {
                "prompt": prompt.prompt,
                **({"tools": [*prompt.tools]} if prompt.tools else {}),
                COMPLETIONS: texts[at : at + count],
                "tokens": lengths[at : at + count],
            }
            for at, prompt in zip(range(0, len(texts), count), prepared.prompts, strict=True)
        ]

    def _parse_prompt(self, task: TextTask, text: str) -> RecordWithImages[ParsedPrompt]:
        try:
            record = {"question": text, "images": [*self.images]} if self.images else {"prompt": text}
            return PromptReader(task).parse(record)
        except BadRecord as fault:
            raise UsageError(f"--prompt: {fault.reason}") from None


def max_prompt_tokens(task: TextTask, max_new_tokens: int) -> int | None:
    """Return the maximum number of tokens of a prompt; None: any. Raises UsageError where none is left."""
    data = task.recipe.data
    positions = getattr(task.model_source.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return data.max_prompt_length
    room = positions - max_new_tokens
    if room < 1:
        asked = f"--max-new-tokens {max_new_tokens}"
        raise UsageError(f"{asked}: the model has {positions} positions, prompt included; ask for fewer")
    return room if data.max_prompt_length is None else min(room, data.max_prompt_length)


def describe_changes(prompts: Sequence[EncodedPrompt], limit: int | None) -> list[str]:
    """Return a sentence for each way in which the model does not see prompts as they are; `limit`: tokens of a prompt."""
    lines = []
    if cut := sum(prompt.is_cut for prompt in prompts):
        lines.append(
            f"{cut} of {len(prompts)} prompts have more than {limit} tokens, and the model sees the last {limit} only; "
            "shorten them, lower --max-new-tokens, or raise data.max_prompt_length where it is set"
        )
    counts = {name: sum(prompt.lost.get(name, 0) for prompt in prompts) for name in TEMPLATE_COLUMNS}
    return lines + describe_template_counts({"kept": len(prompts), "cuts": counts})


def show_answers(rows: Sequence[Mapping[str, Any]], as_json: bool) -> str:
    """Return one JSON object per line, or each prompt with its answer below."""
    if as_json:
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    blocks = []
    for number, row in enumerate(rows, 1):
        prompt, several = row["prompt"], COMPLETIONS in row
        text = prompt if isinstance(prompt, str) else "\n".join(f"{one['role']}: {one['content']}" for one in prompt)
        answers = zip(row[COMPLETIONS], row["tokens"], strict=True) if several else [(row["answer"], row["tokens"])]
        told = "".join(f"--- answer, {tokens} tokens\n{answer.strip()}\n" for answer, tokens in answers)
        blocks.append(f"=== {number} ===\n{text.strip()}\n{told}")
    return "\n".join(blocks)


def get_text_task(saved: SavedModel | LoadedModel, needs_generation: bool = True) -> TextTask:
    """Return the model's task. Raises TaskError where it does not generate text, or without that need reads none."""
    prompts, name = saved.task.prompts, saved.task.recipe.task
    if prompts is None:
        raise TaskError(f"task {name}: does not generate text; `dstrain evaluate` shows its metrics")
    source = saved.task.model_source
    if needs_generation and (source is None or not source.can_generate):
        raise TaskError(
            f"task {name}: this model scores and does not generate text; `dstrain evaluate` shows its metrics"
        )
    task: TextTask = prompts.task
    return task


def _read_prompts(task: TextTask, max_tokens: int | None) -> list[EncodedPrompt]:
    """Return the prompts of `data.eval`. Raises DataError for more bad records than data.on_error allows."""
    data = task.recipe.data
    assert data.eval is not None
    source = task.prompts.open_source(data.eval)
    report = BuildReport()
    encode = PromptEncode(source, PromptReader(task, max_tokens))
    prompts = [row["prompt"] for chunk in iter_encoded(source, encode, report) for row in chunk]
    check_bad_records(report, PreparePolicy(task=task.recipe.task, on_error=data.on_error))
    if report.bad:
        log_stderr(
            f"{len(report.bad)} of {report.read} records have no usable prompt and are skipped; "
            f"the first: {report.bad[0].reason}"
        )
    return prompts


def check_prompt(item: EncodedPrompt | BadRecord, source: str) -> EncodedPrompt:
    """Return an encoded prompt. Raises DataError, which names `source`, for one that cannot be used."""
    if isinstance(item, BadRecord):
        raise DataError(f"{source}: {item.reason}")
    return item


@dataclass(frozen=True)
class PromptEncode:
    """An `Encode` whose examples hold the prompt of a source's record under `prompt`."""

    source: Source
    reader: PromptReader

    def __call__(self, rows: list[tuple[int, dict[str, Any]]]) -> Sequence[EncodeResult]:
        parsed = [
            prompt
            if isinstance(prompt := try_parse(parse_record, self.reader.parse, record, True), BadRecord)
            else (prompt, self.source.get_base_dir(index))
            for index, record in rows
        ]
        return encode_valid(parsed, self._encode)

    def _encode(self, items: list[tuple[RecordWithImages[ParsedPrompt], Path]]) -> list[EncodeResult]:
        prompts = self.reader.encode([prompt for prompt, _ in items], [folder for _, folder in items])
        return [prompt if isinstance(prompt, BadRecord) else {"prompt": prompt} for prompt in prompts]
