"""dstrain generate: answers of a trained policy, to look at what was learnt."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.evaluate import held_out, named_data
from dstrain.commands.trained_model import Choice, Found, hash_weights, load_found, quieten
from dstrain.config import RunConfig
from dstrain.data.cache.build import Policy, judge
from dstrain.data.cache.token_store import Report, say
from dstrain.data.formats.image_placeholders import Seen
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.prompts import Asked, Prompt
from dstrain.data.sources.open import BadRow, First, open_source
from dstrain.errors import DataError, TaskError, UsageError
from dstrain.preset import Device
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    from dstrain.distributed.world import World


@dataclass(frozen=True)
class Prepared:
    """What is answered."""

    found: Found
    prompts: Sequence[Prompt]
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """An answer to each prompt, in order."""

    choice: Choice
    texts: Sequence[str] = ()
    """Prompts from the command line."""
    data: str | None = None
    """A file, or a dataset on the hub, each record of which asks something."""
    images: Sequence[str] = ()
    """Files of images that the prompts of the command line ask about."""
    sampling: Mapping[str, Any]
    """The fields of `dstrain.train.generate.Sampling`."""
    many = True

    def words(self) -> list[str]:
        words = ["generate", *self.choice.words(), *(word for text in self.texts for word in ("--prompt", text))]
        words += ["--data", named_data(self.data)] if self.data else []
        words += [word for image in self.images for word in ("--image", os.path.realpath(Path(image).expanduser()))]
        return words + [word for name, value in self.sampling.items() for word in (_option(name), str(value))]

    def check(self) -> RunConfig:
        if not self.texts and not self.data:
            raise UsageError("nothing is asked: give --prompt TEXT, or --data FILE with records that ask something")
        if any(not text.strip() for text in self.texts):
            raise UsageError("--prompt is empty; write what is asked")
        if self.images and not self.texts:
            raise UsageError(
                "--image: no --prompt asks about it; give one, or write image and question into a --data file"
            )
        found = self._find()
        if self.images and not _policy_of(found).sees:
            kind = _policy_of(found).model_config.model_type
            raise UsageError(f"--image: this model takes no images ({kind} reads text only); leave the option out")
        for text in self.texts:
            self._asked(_policy_of(found), text)
        return found.task.recipe

    def _find(self) -> Found:
        own = [] if self.data is None else [f"data.eval={json.dumps(held_out(self.data))}", "data.eval_fraction=0"]
        found = self.choice.find(*own)
        _policy_of(found)
        return found

    def ready(self, processes: int, device: Device) -> Prepared:
        quieten()
        found = self._find()
        task = _policy_of(found)
        found.check()
        limit = self._limit(task)
        asked = [self._asked(task, text) for text in self.texts]
        prompts = [_coded(item, "--prompt") for item in task.prompts(asked, [Path.cwd()] * len(asked), limit)]
        prompts += _of_file(task, limit) if self.data else []
        return Prepared(found, prompts, found.ds_config(self.choice.ds_config, processes, device))

    def read_weights(self, ready: Prepared) -> None:
        hash_weights(ready.found.task, ready.found.checkpoint is not None)

    def run(self, ready: Prepared, world: World) -> list[dict[str, Any]]:
        from dstrain.tasks.common.losses import unwrapped
        from dstrain.train.engine.inference import ForwardEngine
        from dstrain.train.generate import Sampling, write_answers

        task = _policy_of(ready.found)
        model = load_found(ready.found, ready.ds_config, world)
        engine = ForwardEngine(unwrapped(model), ready.ds_config, world)
        answers = write_answers(engine, ready.prompts, Sampling(**self.sampling), task.tokenizer, task.sight)
        texts = task.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [
            {"prompt": prompt.text, "answer": text, "tokens": len(answer)}
            for prompt, answer, text in zip(ready.prompts, answers, texts, strict=True)
        ]

    def _limit(self, task: TextTask) -> int | None:
        """Ids of a prompt at most. Raises UsageError where none is left."""
        data, places = task.recipe.data, getattr(task.model_config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(places, int):
            return data.max_prompt_length
        room = places - self.sampling.get("max_new_tokens", 0)
        if room < 1:
            asked = f"--max-new-tokens {self.sampling['max_new_tokens']}"
            raise UsageError(f"{asked}: the model has {places} positions, prompt included; ask for fewer")
        return room if data.max_prompt_length is None else min(room, data.max_prompt_length)

    def _asked(self, task: TextTask, text: str) -> Seen[Asked]:
        try:
            return task.prompt({"question": text, "images": [*self.images]} if self.images else {"prompt": text})
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


def _policy_of(found: Found) -> TextTask:
    """The task. Raises TaskError where its model writes no text."""
    task = found.task
    if not isinstance(task, TextTask):
        raise TaskError(
            f"task {task.recipe.task}: has no text for a model to answer; `dstrain evaluate` shows its metrics"
        )
    if not task.answers:
        raise TaskError(
            f"task {task.recipe.task}: its model gives scores and no answers; `dstrain evaluate` shows how good they are"
        )
    return task


def _of_file(task: TextTask, limit: int | None) -> list[Prompt]:
    """What the records of `data.eval` ask. Raises DataError for bad ones, as `data.on_error` says."""
    data = task.recipe.data
    assert data.eval is not None
    source = open_source(data.eval, data.columns)
    source = First(source, data.max_samples) if data.max_samples else source
    asked, places, folders = [], [], []
    report = Report(read=len(source) + len(source.bad), bad=list(source.bad))
    for index in range(len(source)):
        try:
            asked.append(task.prompt(source[index]))
            places.append(source.where(index))
            folders.append(source.folder_of(index))
        except BadRecord as fault:
            report.bad.append(BadRow(source.where(index), fault.reason))
    prompts = []
    for place, coded in zip(places, task.prompts(asked, folders, limit), strict=True):
        if isinstance(coded, BadRecord):
            report.bad.append(BadRow(place, coded.reason))
        else:
            prompts.append(coded)
    report.kept = len(prompts)
    judge(report, Policy(task=task.recipe.task, on_error=data.on_error))
    if report.bad:
        say(
            f"{len(report.bad)} of {report.read} records ask nothing and are left out; the first: {report.bad[0].reason}"
        )
    return prompts


def _coded(item: Prompt | BadRecord, where: str) -> Prompt:
    if isinstance(item, BadRecord):
        raise DataError(f"{where}: {item.reason}")
    return item


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
