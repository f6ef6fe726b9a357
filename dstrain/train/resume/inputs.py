"""Digests of data, tokenizer and task file: recorded in checkpoints, compared on resume."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.cache import file_digest
from dstrain.config.schema import DatasetConfig
from dstrain.data.cache.token_store import TokenizedDataset
from dstrain.data.dataset import Dataset
from dstrain.data.fingerprint import tokenizer_fingerprint
from dstrain.data.sources.folder import find_structure_files
from dstrain.data.sources.open import open_source
from dstrain.errors import DataError, Fault, ResumeError
from dstrain.models.weights.fingerprint import config_fingerprint
from dstrain.tasks import Task
from dstrain.tasks.common.record_task import RecordTask
from dstrain.tasks.common.task_files import digest_task_files
from dstrain.tasks.common.text import TextTask
from dstrain.train.resume.recorded import is_change_allowed
from dstrain.train.state.manifest import CheckpointInfo

# A path in the recipe does not show that a file has changed between two starts. Another file would change
# the samples, and a tokenizer trained on it would give every id another meaning for the trained weights.
InputDigests = Mapping[str, Mapping[str, Any]]
"""Key -> content, as run.json has it under `inputs`:

    data.train        {digest, samples, images, tokens}    data.eval    {path, digest, samples, images, tokens}
    model.tokenizer   {digest}                             task         {digest}, for a task file of the user
    model.path        {digest}: of the model's config; of its weights, where they count, see fingerprints.py
    options.safety.harmless_rm  {digest}: of the tokenizer or processor of a reward model; others likewise
                     {kept}: of the training samples that its precomputed scores leave
"""

_CHANGE_MESSAGES = {
    "digest": "its content is not what the run was trained on",
    "images": "its images are not those that the run was trained on",
    "tokens": "gives other tokens than the run was trained on",
    "kept": "its scores, computed again, leave other training samples than the run was trained on",
}
_FIX_MESSAGES = {
    "data.train": "restore the old file",
    "data.eval": "restore the old file",
    "model.tokenizer": "restore the old tokenizer and chat template",
    "model.path": "restore the old model",
    "task": "restore the old task file, and the modules beside it that it imports",
}


def digest_input_files(task: Task) -> dict[str, dict[str, Any]]:
    """Return the digests of files that the recipe names, computed without torch. Raises DataError."""
    data, found = task.recipe.data, dict[str, dict[str, Any]]()
    if data.train:
        found["data.train"] = {"digest": _digest_sources(task, data.train)}
    if data.eval:
        found["data.eval"] = {"path": str(data.eval.path), "digest": _digest_sources(task, [data.eval])}
    if (digest := digest_task_files(type(task))) is not None:
        found["task"] = {"digest": digest}
    return found


def digest_inputs(task: Task, train_dataset: Dataset, eval_dataset: Dataset | None) -> dict[str, dict[str, Any]]:
    """Return all digests, for run.json of a checkpoint."""
    found = digest_input_files(task)
    for key, examples in (("data.train", train_dataset), ("data.eval", eval_dataset)):
        if examples is not None and key in found:
            found[key] |= {"samples": len(examples)}
            found[key] |= {"images": examples.image_digest} if examples.image_digest else {}
            found[key] |= {"tokens": examples.store.digest} if isinstance(examples, TokenizedDataset) else {}
    if "data.train" not in found:
        found["data.train"] = {"samples": len(train_dataset)}
    return found | digest_model_files(task)


def digest_model_files(task: Task) -> dict[str, dict[str, Any]]:
    """Return the digests of the model's config, of its tokenizer and of those of reward models."""
    found = {}
    if task.recipe.model.path and (digest := config_fingerprint(task.recipe.model.path)):
        found["model.path"] = {"digest": digest}
    tasks = {"model.tokenizer": task} | {scorer.recipe_key: scorer.task for scorer in task.loss_inputs.scorers}
    for key, one in tasks.items():
        if isinstance(one, TextTask) and one.model_source.reads_text:
            found[key] = {"digest": digest_tokenizer(one)}
    return found


def with_selected_samples(inputs: InputDigests, task: Task, dataset: Dataset) -> InputDigests:
    """Return the digests with that of the training samples that precomputed scores leave.

    Scores that are computed again, on another device or in another precision, differ by rounding, and a score at a
    threshold then gives the run other samples.
    """
    scorers = [scorer for scorer in task.loss_inputs.scorers if scorer.is_cached]
    if task.loss_inputs.select is None or not scorers or not isinstance(dataset, TokenizedDataset):
        return inputs
    key = scorers[-1].recipe_key
    digest = hashlib.sha256(dataset.store.record_indices[dataset.rows].tobytes()).hexdigest()
    return {**inputs, key: {**inputs.get(key, {}), "kept": digest}}


def digest_tokenizer(task: TextTask) -> str:
    """Return the fingerprint of the tokenizer, or of the processor with its tokenizer."""
    processor = task.model_source.vision_processor
    return tokenizer_fingerprint(task.tokenizer) if processor is None else processor.fingerprint


def check_inputs_unchanged(checkpoint: CheckpointInfo, current: InputDigests, allowed_keys: Collection[str]) -> None:
    """Raise ResumeError for every input that differs from the checkpoint's, unless `allowed_keys` permits it."""
    recorded = checkpoint.read_run_info().get("inputs")
    if recorded is None:
        raise ResumeError(f"{checkpoint.path}/run.json: it does not record the run's inputs; choose another checkpoint")
    faults, tokens = [], _CHANGE_MESSAGES["tokens"]
    # A key that is allowed to change may change the number of samples, and the tokens.
    changes = [
        (key, what)
        for key, what in iter_input_changes(recorded, current)
        if not is_change_allowed(key, allowed_keys) and not (what.startswith("gives") and allowed_keys)
    ]
    # Other tokens follow from whatever else differs.
    for key, what in [change for change in changes if change[1] != tokens] or changes:
        fix = _FIX_MESSAGES.get(key, "restore the old folder")
        if what == tokens:
            fix = "use the library versions of the run's environment.json"
        fix = f"{fix}, choose another --run-dir, or pass --allow-change {key}"
        faults.append(Fault(key, f"{what} (step {checkpoint.step})", fix))
    if faults:
        raise ResumeError(faults)


def iter_input_changes(previous: InputDigests, current: InputDigests) -> Iterator[tuple[str, str]]:
    """Yield (key, difference) for inputs that both have and that differ."""
    for key, was in previous.items():
        has = current.get(key, {})
        if was.get("path") != has.get("path"):
            continue  # another evaluation file was chosen in the recipe: nothing to refuse
        for part, what in _CHANGE_MESSAGES.items():
            if part in was and part in has and was[part] != has[part]:
                yield key, what
                break
        else:
            if key != "data.eval" and "samples" in was and "samples" in has and was["samples"] != has["samples"]:
                yield key, f"gives {has['samples']} samples, but the run is trained on {was['samples']}"


def _digest_sources(task: Task, sources: Sequence[DatasetConfig]) -> str:
    if isinstance(task, RecordTask):
        return task.open_sources(sources).digest
    return hashlib.sha256(" ".join(_digest_source(item) for item in sources).encode()).hexdigest()


def _digest_source(source: DatasetConfig) -> str:
    """Return a digest of a file's bytes, of a folder of structures, or of the names and sizes of a folder's files.

    Reading all files of any folder could take as long as training.
    """
    path = Path(source.path).expanduser()
    try:
        if path.is_file():
            return file_digest(path)
        if path.is_dir() and not find_structure_files(path):
            files = sorted(one for one in path.rglob("*") if one.is_file())
            return " ".join(f"{one.relative_to(path)} {one.stat().st_size}" for one in files)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    return open_source(source).digest
