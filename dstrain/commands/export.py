"""dstrain export: a folder that transformers loads, proven tensor by tensor and on a probe batch."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dstrain.batch import Batch
from dstrain.commands.checks.untrusted_folder import enabled
from dstrain.commands.checks.untrusted_recipe import check_probes
from dstrain.commands.trained_model import EXPORT_RECIPE, Trained, load_trained
from dstrain.config import show_recipe
from dstrain.errors import CheckpointError, DstrainError, UsageError
from dstrain.models.adapters.folder import read_adapter
from dstrain.models.adapters.merge import merge_adapters
from dstrain.models.weights.module_file import save_module
from dstrain.report.run_log import sync_folder
from dstrain.tasks import Task
from dstrain.tasks.common.registry import keep_task_file
from dstrain.train.checkpoint.disk_space import free_bytes
from dstrain.train.checkpoint.export_checks import (
    Digest,
    check_against_checkpoint,
    check_files,
    check_finite,
    check_reloaded,
    digests,
    in_a_folder,
    size_of,
    tensors_of,
)
from dstrain.train.state.files import StoredState
from dstrain.units import show_bytes

PROBES = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
FILE_SIZE = "2GB"
"""Most of a file's size: safetensors below 0.8 copies a file's tensors before it writes them."""
BESIDE = 64 << 20
"""Bytes for what lies beside the weights: a tokenizer, configs."""


@dataclass(frozen=True)
class Proof:
    """What the reloaded model was compared by."""

    step: int | None
    dtype: str
    difference: float
    """Largest difference of an output, relative to outputs above 1."""


@dataclass(frozen=True)
class _Said:
    """What the model was and said before it was written; it is gone by now."""

    task: Task
    step: int | None
    dtype: torch.dtype
    probes: Sequence[Batch]
    outputs: Sequence[torch.Tensor]
    weights: Mapping[str, Digest]


def export_model(run: Path, step: str, to: Path, sets: Sequence[str] = (), merge: bool = False) -> Proof:
    """Write the folder beside its place, reload it, compare, and only then give it its name.

    `merge`: adapters are added to the weights they lie on, and one whole model is written. The model is in memory once:
    it is gone before the folder is reloaded.
    """
    place = Path(os.path.realpath(to))
    if place.exists() and not place.is_dir():
        raise UsageError(f"--to {to}: is a file; choose another name")
    if place.exists() and any(place.iterdir()):
        raise UsageError(f"--to {to}: exists and is not empty; choose another folder")
    if place.is_mount():
        raise UsageError(f"--to {to}: a disk is mounted there, which no folder can replace; name a folder inside")
    check_probes(run, EXPORT_RECIPE, sets)
    with _whole_or_absent(place) as partial:
        said = _write(load_trained(run, step, [*_halved(run), *sets]), partial, merge)
        gc.collect()  # modules hang in cycles
        difference = _reload(said, partial)
    return Proof(said.step, str(said.dtype).removeprefix("torch."), difference)


def _halved(run: Path) -> list[str]:
    """What has a run in fp16 exported in fp16, as --set takes it; other commands look at it in fp32, which CPUs are made for."""
    return ["model.dtype=float16"] if (run / "ds_config.json").is_file() and enabled(run, "fp16") else []


@contextmanager
def _whole_or_absent(to: Path) -> Iterator[Path]:
    """Yields a name beside `to`; the folder that comes there is renamed at the end, or removed where anything fails."""
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        yield partial
        with _in_words(f"--to {to}: cannot be written"):
            for path in (*partial.rglob("*"), partial):
                sync_folder(path)
            os.rename(partial, to)
            sync_folder(to.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Raises CheckpointError for what the disk and the libraries say inside."""
    try:
        yield
    except DstrainError:
        raise
    except Exception as error:  # a full disk has another name in each library
        reason = " ".join(str(error).split()) or type(error).__name__
        mend = "make room, or choose another place" if isinstance(error, OSError | SafetensorError) else "report it"
        raise CheckpointError(f"{what} ({reason}); nothing was left there: {mend}") from error


@torch.no_grad()
def _write(trained: Trained, folder: Path, merge: bool) -> _Said:
    """Raises CheckpointError where the folder does not hold what the checkpoint does."""
    _check_form(trained, merge)
    task, model = trained.task, trained.model
    examples = task.examples("eval") or task.examples("train") or []
    if not examples:
        raise UsageError("there is no sample to probe the export with; give some with --set data.eval=FILE")
    probes = [task.collate([examples[index]]) for index in range(min(PROBES, len(examples)))]
    outputs = [task.outputs(model, batch).double() for batch in probes]
    if trained.checkpoint is not None:
        check_against_checkpoint(model, StoredState(trained.checkpoint))
    whole: Any = merge_adapters(model) if merge else model
    if merge:
        check_finite(whole)
    _save(whole, folder, task, merge)
    return _Said(task, trained.step, next(whole.parameters()).dtype, probes, outputs, digests(tensors_of(whole)))


def _save(model: Any, folder: Path, task: Task, merge: bool) -> None:
    """Weights, what lies beside them, and the recipe. Raises CheckpointError where the files do not hold the model."""
    from peft import PeftModel
    from transformers import PreTrainedModel

    of_a_library = isinstance(model, PreTrainedModel | PeftModel)
    _check_room(folder, size_of(in_a_folder(model) if of_a_library else tensors_of(model)))
    with _in_words(f"{folder.parent}: cannot be written"):
        folder.mkdir(parents=True)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(str(folder), **({"max_shard_size": FILE_SIZE} if of_a_library else {}))
        else:
            save_module(model, folder)
        keep_task_file(task, folder)
        task.save_extras(folder)
        (folder / EXPORT_RECIPE).write_text(show_recipe(task.exported(merge)), encoding="utf-8")
        if of_a_library:
            check_files(folder, in_a_folder(model))  # anew: for some families it holds copies


def _check_room(folder: Path, size: int) -> None:
    """Raise UsageError where the disk has not this many bytes and what lies beside them."""
    if (free := free_bytes(folder)) < size + BESIDE:
        raise UsageError(
            f"--to: the weights take {show_bytes(size)}, with {show_bytes(BESIDE)} for what lies beside them, and "
            f"{folder.parent} has {show_bytes(free)} free; make room, or choose another place"
        )


def _check_form(trained: Trained, merge: bool) -> None:
    """Raise where the model has no such folder."""
    recipe = trained.task.recipe
    if merge and recipe.model.lora is None:
        raise UsageError("--merge-lora: the run has no adapters (model.lora); leave the flag out")
    start = recipe.model
    known = _is_of_transformers(trained.model)
    held = start.path is not None and start.init is None and read_adapter(start.path) is None and known
    if start.lora is not None and not merge and not held:
        raise UsageError(
            "its adapters lie on weights that no folder holds as they are (model.config, model.init, a module of your own, or "
            "an adapter merged into its base), so that nobody could load them; add --merge-lora to write one whole model"
        )


def _is_of_transformers(model: Any) -> bool:
    """Whether a model, without its adapters, is one that transformers loads."""
    from transformers import PreTrainedModel

    return isinstance(getattr(model, "get_base_model", lambda: model)(), PreTrainedModel)


@torch.no_grad()
def _reload(said: _Said, folder: Path) -> float:
    """How far the reloaded model's outputs lie from what was said. Raises CheckpointError where it is too far."""
    with _in_words("the exported folder cannot be loaded"):
        model = said.task.reload(folder).eval()
    check_reloaded(model, said.weights)
    differences = []
    for mine, batch in zip(said.outputs, said.probes, strict=True):
        theirs = said.task.outputs(model, batch).double()
        differences.append(((mine - theirs).abs() / mine.abs().clamp(min=1)).reshape(-1))
    worst = float(torch.cat(differences).max())  # nan where one is
    if not worst <= TOLERANCE[said.dtype]:
        raise CheckpointError(
            f"the exported model was reloaded and its outputs differ by {worst:.2g}; nothing was written"
        )
    return worst
