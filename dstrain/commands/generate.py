"""dstrain generate: answers of a trained policy, to look at what was learnt."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.evaluate import make_eval_source, resolve_data_path
from dstrain.commands.trained_model import ModelSelector, SavedModel, hash_weights, load_saved_model, quiet_libraries
from dstrain.config import RunConfig
from dstrain.console import log_stderr
from dstrain.data.cache.build import PreparePolicy, check_bad_records
from dstrain.data.cache.token_store import BuildReport
from dstrain.data.encoding.prompts import EncodedPrompt
from dstrain.data.formats.image_placeholders import RecordWithImages
from dstrain.data.formats.prompts import ParsedPrompt
from dstrain.data.records import BadRecord, BadRow
from dstrain.data.sources.open import HeadSource, open_source
from dstrain.errors import DataError, TaskError, UsageError
from dstrain.preset import Device
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    from dstrain.distributed.world import World


@dataclass(frozen=True)
class PreparedGeneration:
    """What is answered."""

    saved_model: SavedModel
    prompts: Sequence[EncodedPrompt]
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """An answer to each prompt, in order."""

    selector: ModelSelector
    texts: Sequence[str] = ()
    """Prompts from the command line."""
    data: str | None = None
    """A file, or a dataset on the hub, each record of which asks something."""
    images: Sequence[str] = ()
    """Files of images that the prompts of the command line ask about."""
    sampling: Mapping[str, Any]
    """The fields of `dstrain.train.generate.Sampling`."""
    is_parallel = True

    def to_argv(self) -> list[str]:
        words = ["generate", *self.selector.to_argv(), *(word for text in self.texts for word in ("--prompt", text))]
        words += ["--data", resolve_data_path(self.data)] if self.data else []
        words += [word for image in self.images for word in ("--image", os.path.realpath(Path(image).expanduser()))]
        return words + [word for name, value in self.sampling.items() for word in (_to_flag(name), str(value))]

    def check_recipe(self) -> RunConfig:
        if not self.texts and not self.data:
            raise UsageError("nothing is asked: give --prompt TEXT, or --data FILE with records that ask something")
        if any(not text.strip() for text in self.texts):
            raise UsageError("--prompt is empty; write what is asked")
        if self.images and not self.texts:
            raise UsageError(
                "--image: no --prompt asks about it; give one, or write image and question into a --data file"
            )
        found = self._find_model()
        if self.images and not _get_text_task(found).is_multimodal:
            kind = _get_text_task(found).model_config.model_type
            raise UsageError(f"--image: this model takes no images ({kind} reads text only); leave the option out")
        for text in self.texts:
            self._parse_prompt(_get_text_task(found), text)
        return found.task.recipe

    def _find_model(self) -> SavedModel:
        own = (
            []
            if self.data is None
            else [f"data.eval={json.dumps(make_eval_source(self.data))}", "data.eval_fraction=0"]
        )
        found = self.selector.find_model(*own)
        _get_text_task(found)
        return found

    def prepare(self, world_size: int, device: Device) -> PreparedGeneration:
        quiet_libraries()
        found = self._find_model()
        task = _get_text_task(found)
        found.check_loadable()
        limit = self._max_prompt_tokens(task)
        asked = [self._parse_prompt(task, text) for text in self.texts]
        prompts = [
            _check_prompt(item, "--prompt") for item in task.encode_prompts(asked, [Path.cwd()] * len(asked), limit)
        ]
        prompts += _read_prompts(task, limit) if self.data else []
        return PreparedGeneration(found, prompts, found.build_ds_config(self.selector.ds_config, world_size, device))

    def cache_weight_hashes(self, prepared: PreparedGeneration) -> None:
        hash_weights(prepared.saved_model.task, prepared.saved_model.checkpoint is not None)

    def run(self, prepared: PreparedGeneration, world: World) -> list[dict[str, Any]]:
        from dstrain.tasks.common.losses import unwrap_peft
        from dstrain.train.engine.inference import ForwardEngine
        from dstrain.train.generate import SamplingParams, generate_answers

        task = _get_text_task(prepared.saved_model)
        model = load_saved_model(prepared.saved_model, prepared.ds_config, world)
        engine = ForwardEngine(unwrap_peft(model), prepared.ds_config, world)
        answers = generate_answers(
            engine, prepared.prompts, SamplingParams(**self.sampling), task.tokenizer, task.vision_processor
        )
        texts = task.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [
            {"prompt": prompt.text, "answer": text, "tokens": len(answer)}
            for prompt, answer, text in zip(prepared.prompts, answers, texts, strict=True)
        ]

    def _max_prompt_tokens(self, task: TextTask) -> int | None:
        """Ids of a prompt at most. Raises UsageError where none is left."""
        data, places = task.recipe.data, getattr(task.model_config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(places, int):
            return data.max_prompt_length
        room = places - self.sampling.get("max_new_tokens", 0)
        if room < 1:
            asked = f"--max-new-tokens {self.sampling['max_new_tokens']}"
            raise UsageError(f"{asked}: the model has {places} positions, prompt included; ask for fewer")
        return room if data.max_prompt_length is None else min(room, data.max_prompt_length)

    def _parse_prompt(self, task: TextTask, text: str) -> RecordWithImages[ParsedPrompt]:
        try:
            return task.parse_prompt({"question": text, "images": [*self.images]} if self.images else {"prompt": text})
        except BadRecord as fault:
            raise UsageError(f"--prompt: {fault.reason}") from None


def show_answers(rows: Sequence[Mapping[str, Any]], as_json: bool) -> str:
    """One JSON object a line, or each prompt with its answer below."""
    if as_json:
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    blocks = [
        f"=== {number} ===\n{row['prompt'].strip()}\n--- answer, {row['tokens']} tokens\n{row['answer'].strip()}\n"
        for number, row in enumerate(rows, 1)
    ]
    return "\n".join(blocks)


def _get_text_task(saved: SavedModel) -> TextTask:
    """The task. Raises TaskError where its model writes no text."""
    task = saved.task
    if not isinstance(task, TextTask):
        raise TaskError(
            f"task {task.recipe.task}: has no text for a model to answer; `dstrain evaluate` shows its metrics"
        )
    if not task.can_generate:
        raise TaskError(
            f"task {task.recipe.task}: its model gives scores and no answers; `dstrain evaluate` shows how good they are"
        )
    return task


def _read_prompts(task: TextTask, max_tokens: int | None) -> list[EncodedPrompt]:
    """What the records of `data.eval` ask. Raises DataError for bad ones, as `data.on_error` says."""
    data = task.recipe.data
    assert data.eval is not None
    source = open_source(data.eval, data.columns)
    source = HeadSource(source, data.max_samples) if data.max_samples else source
    asked, places, folders = [], [], []
    report = BuildReport(read=len(source) + len(source.bad_rows), bad=list(source.bad_rows))
    for index in range(len(source)):
        try:
            asked.append(task.parse_prompt(source[index]))
            places.append(source.location(index))
            folders.append(source.get_base_dir(index))
        except BadRecord as fault:
            report.bad.append(BadRow(source.location(index), fault.reason))
    prompts = []
    for place, coded in zip(places, task.encode_prompts(asked, folders, max_tokens), strict=True):
        if isinstance(coded, BadRecord):
            report.bad.append(BadRow(place, coded.reason))
        else:
            prompts.append(coded)
    report.kept = len(prompts)
    check_bad_records(report, PreparePolicy(task=task.recipe.task, on_error=data.on_error))
    if report.bad:
        log_stderr(
            f"{len(report.bad)} of {report.read} records ask nothing and are left out; the first: {report.bad[0].reason}"
        )
    return prompts


def _check_prompt(item: EncodedPrompt | BadRecord, source: str) -> EncodedPrompt:
    if isinstance(item, BadRecord):
        raise DataError(f"{source}: {item.reason}")
    return item


def _to_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
