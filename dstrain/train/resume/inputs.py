"""What a run learns from, by content: each checkpoint records it, and a run that goes on is held to it.

    data.train        {digest, samples, images}    data.eval    {path, digest, samples, images}
    model.tokenizer   {digest}                     task         {digest}: of a task file of one's own

A path in the recipe says where something lies, not what it is. Without this, a file that changed between two starts would
change the samples, and a tokenizer trained on it would give every id another meaning for the weights learned so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.cache_dir import file_digest
from dstrain.config.schema import DatasetConfig
from dstrain.data.cache.build import tokenizer_fingerprint
from dstrain.data.sources.open import open_source
from dstrain.errors import DataError, Fault, ResumeError
from dstrain.tasks import Task
from dstrain.tasks.common.registry import find_task_file
from dstrain.tasks.common.text import TextTask
from dstrain.train.resume.recorded import is_change_allowed
from dstrain.train.state.manifest import CheckpointInfo

InputDigests = Mapping[str, Mapping[str, Any]]

_CHANGE_MESSAGES = {
    "digest": "its content is not what it was when the run learned from it",
    "images": "its images are not those that the run learned from",
}
_FIX_MESSAGES = {
    "data.train": "put the old file back",
    "data.eval": "put the old file back",
    "model.tokenizer": "put the old tokenizer back",
    "task": "put the old task file back",
}


def digest_input_files(task: Task) -> dict[str, dict[str, Any]]:
    """What can be told without torch: of the files that the recipe names. Raises DataError where one cannot be read."""
    data, found = task.recipe.data, dict[str, dict[str, Any]]()
    if data.train:
        found["data.train"] = {"digest": _digest_sources(task, data.train)}
    if data.eval:
        found["data.eval"] = {"path": str(data.eval.path), "digest": _digest_sources(task, [data.eval])}
    if (source := find_task_file(task)) is not None:
        found["task"] = {"digest": file_digest(source)}
    return found


def digest_inputs(
    task: Task, train_dataset: Sequence[Any], eval_dataset: Sequence[Any] | None
) -> dict[str, dict[str, Any]]:
    """All of it, for a checkpoint's run.json. `train` and `test`: the task's examples."""
    found = digest_input_files(task)
    for key, examples in (("data.train", train_dataset), ("data.eval", eval_dataset)):
        if examples is not None and key in found:
            found[key] |= {"samples": len(examples)} | _image_digest(examples)
    if "data.train" not in found:
        found["data.train"] = {"samples": len(train_dataset)}
    if isinstance(task, TextTask):
        digest = (
            tokenizer_fingerprint(task.tokenizer)
            if task.vision_processor is None
            else task.vision_processor.fingerprint
        )
        found["model.tokenizer"] = {"digest": digest}
    return found


def check_inputs_unchanged(checkpoint: CheckpointInfo, current: InputDigests, allowed_keys: Collection[str]) -> None:
    """Raise ResumeError for all that is not what a checkpoint's run learned from; `allowed` as --allow-change has it.

    A checkpoint that recorded nothing of it is taken as it is.
    """
    faults = [
        Fault(
            key,
            f"{what} (step {checkpoint.step})",
            f"{_FIX_MESSAGES[key]}, choose another --run-dir, or pass --allow-change {key}",
        )
        for key, what in iter_input_changes(checkpoint.read_run_info().get("inputs", {}), current)
        if not is_change_allowed(key, allowed_keys)
        and not (what.startswith("gives") and allowed_keys)  # an allowed key may change their number
    ]
    if faults:
        raise ResumeError(faults)


def iter_input_changes(previous: InputDigests, current: InputDigests) -> Iterator[tuple[str, str]]:
    """(key, what is true of it) for what differs of all that both know of."""
    for key, was in previous.items():
        has = current.get(key, {})
        if was.get("path") != has.get("path"):
            continue  # another evaluation file: the recipe says so
        for part, what in _CHANGE_MESSAGES.items():
            if part in was and part in has and was[part] != has[part]:
                yield key, what
                break
        else:
            if key != "data.eval" and "samples" in was and "samples" in has and was["samples"] != has["samples"]:
                yield key, f"gives {has['samples']} samples, and the run learns from {was['samples']}"


def _digest_sources(task: Task, sources: Sequence[DatasetConfig]) -> str:
    if isinstance(task, TextTask):
        return task.open_sources(sources).digest
    return hashlib.sha256(" ".join(_digest_source(item) for item in sources).encode()).hexdigest()


def _digest_source(source: DatasetConfig) -> str:
    """Of a file its bytes; of a folder the names and sizes of its files, since to read them all may take as long as training."""
    path = Path(source.path).expanduser()
    try:
        if path.is_file():
            return file_digest(path)
        if path.is_dir():
            files = sorted(one for one in path.rglob("*") if one.is_file())
            return " ".join(f"{one.relative_to(path)} {one.stat().st_size}" for one in files)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    return open_source(source).digest


def _image_digest(examples: Any) -> dict[str, str]:
    """A hash of the images of a token store, by their content."""
    album = getattr(getattr(examples, "store", None), "image_index", None)
    return {} if album is None else {"images": album.digest}
