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
from dstrain.config.schema import HeldOutConfig
from dstrain.data.cache.build import tokenizer_fingerprint
from dstrain.data.sources.open import open_source
from dstrain.errors import DataError, Fault, ResumeError
from dstrain.tasks import Task
from dstrain.tasks.common.registry import task_source
from dstrain.tasks.common.text import TextTask
from dstrain.train.state.manifest import CheckpointInfo

Inputs = Mapping[str, Mapping[str, Any]]

_WHAT = {
    "digest": "its content is not what it was when the run learned from it",
    "images": "its images are not those that the run learned from",
}
_BACK = {
    "data.train": "put the old file back",
    "data.eval": "put the old file back",
    "model.tokenizer": "put the old tokenizer back",
    "task": "put the old task file back",
}


def files_of(task: Task) -> dict[str, dict[str, Any]]:
    """What can be told without torch: of the files that the recipe names. Raises DataError where one cannot be read."""
    data, found = task.recipe.data, dict[str, dict[str, Any]]()
    if data.train:
        found["data.train"] = {"digest": _digest(task, data.train)}
    if data.eval:
        found["data.eval"] = {"path": str(data.eval.path), "digest": _digest(task, [data.eval])}
    if (source := task_source(task)) is not None:
        found["task"] = {"digest": file_digest(source)}
    return found


def inputs_of(task: Task, train: Sequence[Any], test: Sequence[Any] | None) -> dict[str, dict[str, Any]]:
    """All of it, for a checkpoint's run.json. `train` and `test`: the task's examples."""
    found = files_of(task)
    for key, examples in (("data.train", train), ("data.eval", test)):
        if examples is not None and key in found:
            found[key] |= {"samples": len(examples)} | _images(examples)
    if "data.train" not in found:
        found["data.train"] = {"samples": len(train)}
    if isinstance(task, TextTask):
        digest = tokenizer_fingerprint(task.tokenizer) if task.sight is None else task.sight.fingerprint
        found["model.tokenizer"] = {"digest": digest}
    return found


def check_inputs(start: CheckpointInfo, now: Inputs, allowed: Collection[str]) -> None:
    """Raise ResumeError for all that is not what a checkpoint's run learned from; `allowed` as --allow-change has it.

    A checkpoint that recorded nothing of it is taken as it is.
    """
    faults = [
        Fault(
            key,
            f"{what} (step {start.step})",
            f"{_BACK[key]}, choose another --run-dir, or pass --allow-change {key}",
        )
        for key, what in changed_inputs(start.record().get("inputs", {}), now)
        if not is_allowed(key, allowed)
        and not (what.startswith("gives") and allowed)  # an allowed key may change their number
    ]
    if faults:
        raise ResumeError(faults)


def changed_inputs(before: Inputs, now: Inputs) -> Iterator[tuple[str, str]]:
    """(key, what is true of it) for what differs of all that both know of."""
    for key, was in before.items():
        has = now.get(key, {})
        if was.get("path") != has.get("path"):
            continue  # another evaluation file: the recipe says so
        for part, what in _WHAT.items():
            if part in was and part in has and was[part] != has[part]:
                yield key, what
                break
        else:
            if key != "data.eval" and "samples" in was and "samples" in has and was["samples"] != has["samples"]:
                yield key, f"gives {has['samples']} samples, and the run learns from {was['samples']}"


def is_allowed(key: str, allowed: Collection[str]) -> bool:
    """Whether --allow-change names the key or the block that it stands in."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _digest(task: Task, items: Sequence[HeldOutConfig]) -> str:
    if isinstance(task, TextTask):
        return task.source(items).digest
    return hashlib.sha256(" ".join(_content(item) for item in items).encode()).hexdigest()


def _content(item: HeldOutConfig) -> str:
    """Of a file its bytes; of a folder the names and sizes of its files, since to read them all may take as long as training."""
    path = Path(item.path).expanduser()
    try:
        if path.is_file():
            return file_digest(path)
        if path.is_dir():
            files = sorted(one for one in path.rglob("*") if one.is_file())
            return " ".join(f"{one.relative_to(path)} {one.stat().st_size}" for one in files)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    return open_source(item).digest


def _images(examples: Any) -> dict[str, str]:
    """A hash of the images of a token store, by their content."""
    album = getattr(getattr(examples, "store", None), "album", None)
    return {} if album is None else {"images": album.digest}
