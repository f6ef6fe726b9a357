"""`dstrain export`: a Hugging Face folder, verified tensor by tensor and on a probe batch."""

from __future__ import annotations

import errno
import gc
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dstrain.batch import Batch
from dstrain.commands.publish import Publication, list_files, make_card, push_to_hub, write_card
from dstrain.commands.trained_model import LoadedModel, load_trained_model
from dstrain.commands.untrusted import check_probe_data, is_precision_enabled
from dstrain.errors import CheckpointError, DstrainError, UsageError
from dstrain.files import atomic_folder, remove_stale_partials, sync_folder
from dstrain.models.adapters import merge_adapters
from dstrain.models.folder import read_adapter
from dstrain.models.params import unwrap_peft
from dstrain.models.quantization import dequantized_weights, preload_bitsandbytes
from dstrain.models.weight_names import describe_name_changes, list_tensors
from dstrain.process_setup import log_if_slow
from dstrain.tasks import Task
from dstrain.tasks.common.task import EXPORT_RECIPE
from dstrain.training.export_answers import ProbeAnswers, answer_probes, check_answers
from dstrain.training.export_checks import (
    TensorDigest,
    check_exported_files,
    check_loaded_model,
    check_matches_checkpoint,
    check_params_finite,
    compute_digests,
    count_bytes,
    get_export_tensors,
    get_state_tensors,
)
from dstrain.training.export_folder import keep_base_names, write_model_folder
from dstrain.training.saver import get_free_bytes
from dstrain.training.state.files import CheckpointReader
from dstrain.units import format_bytes

NUM_PROBES = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
MAX_SHARD_SIZE = "2GB"
"""Largest file by default: safetensors below 0.8 copies a file's tensors before it writes them."""
EXTRA_FILES_BYTES = 64 << 20
"""Bytes for the files next to the weights: tokenizer and configs."""


@dataclass(frozen=True)
class ExportReport:
    """Step and precision of an export, and how far the reloaded model differs."""

    step: int | None
    dtype: str
    max_diff: float
    """Largest difference of an output, relative for outputs above 1."""
    files: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Path in the folder -> size in bytes."""
    url: str | None = None
    """Address of the repository that it was uploaded to."""
    notes: Sequence[str] = field(default=(), compare=False)
    """How its files differ from those of the base model."""
    stop_ids: Collection[int] = field(default=(), compare=False)
    """Ids that end an answer; empty for a model that writes no text."""

    def describe(self, folder: Path, target: Publication) -> str:
        """Return what was written and where; of a dry run, each file with its size."""
        step = "" if self.step is None else f"step {self.step}, "
        line = f"{folder}: {step}{self.dtype}; reloaded, outputs differ by at most {self.max_diff:.2g}"
        if self.stop_ids:
            ends = ", ".join(map(str, sorted(self.stop_ids)))
            line += f"; plain transformers answers as here, and stops at {ends}"
        line = "\n".join([line, *self.notes])
        if not target.dry_run:
            return line if self.url is None else f"{line}\n{self.url}: uploaded"
        files = [f"{format_bytes(size):>12}  {name}" for name, size in self.files.items()]
        private = ", private" if target.private else ""
        place = "" if target.repo_id is None else f", for {target.repo_id} on the Hub{private}"
        total = f"{len(self.files)} files, {format_bytes(sum(self.files.values()))}{place}"
        return "\n".join([line, *files, f"{total}; a dry run: nothing was written or uploaded"])


@dataclass(frozen=True)
class _Expected:
    """Taken before the model is freed: probe batches, their outputs, and a digest of every tensor."""

    task: Task
    step: int | None
    dtype: torch.dtype
    probes: Sequence[Batch]
    outputs: Sequence[torch.Tensor]
    answers: ProbeAnswers | None
    """Those of a model that writes text."""
    tensor_digests: Mapping[str, TensorDigest]
    notes: Sequence[str]


def export_model(
    run_dir: Path,
    step: str,
    output_dir: Path,
    overrides: Sequence[str] = (),
    merge_lora: bool = False,
    max_shard_size: str | None = None,
    publication: Publication | None = None,
) -> ExportReport:
    """Write the folder under a temporary name, reload it, compare, and only then rename it. Raises UsageError.

    With `merge_lora`, adapters are merged into their base, and one complete model is written; the weights of a
    quantized base are dequantized before. `max_shard_size`: of a file of weights, such as 5GB; adapters, and a model
    that is not transformers', are one file. Uploads the folder where `publication` names a repository: raises RunError
    where that fails, and the folder stays.
    Memory holds one model: it is freed before the folder is reloaded. Raises CheckpointError if the
    reloaded model differs.
    """
    publication, max_shard_size = publication or Publication(), max_shard_size or MAX_SHARD_SIZE
    publication.check()
    _check_size(max_shard_size)
    place = Path(os.path.realpath(output_dir))
    if place.exists() and not place.is_dir():
        raise UsageError(f"--to {output_dir}: is a file; choose another name")
    if place.exists() and any(place.iterdir()):
        raise UsageError(f"--to {output_dir}: exists and is not empty; choose another folder")
    if place.is_mount():
        raise UsageError(f"--to {output_dir}: a disk is mounted there; name a folder inside it")
    check_probe_data(run_dir, EXPORT_RECIPE, overrides)
    remove_stale_partials(place)
    # A dry run leaves the partial folder, which is removed.
    with atomic_folder(place, (lambda *_: None) if publication.dry_run else _rename_synced) as partial:
        # A merge into quantized weights would round the sum again.
        with dequantized_weights() if merge_lora else nullcontext():
            # An fp16 run is exported in fp16. Other commands load it in fp32, since CPUs are slow in fp16.
            is_fp16 = (run_dir / "ds_config.json").is_file() and is_precision_enabled(run_dir, "fp16")
            own = ["model.dtype=float16"] if is_fp16 else []
            loaded = load_trained_model(run_dir, step, [*own, *overrides])
        with log_if_slow(f"writing {output_dir}"):
            card = make_card(loaded, run_dir, merge_lora, publication.repo_id or place.name, publication)
            expected = _write_export(loaded, partial, merge_lora, max_shard_size, card)
        del loaded
        gc.collect()  # modules are in reference cycles
        with log_if_slow("reloading it and comparing outputs"):
            difference = _verify_reload(expected, partial)
        files = list_files(partial)
    stops = () if expected.answers is None else expected.answers.stop_ids
    is_pushed = publication.repo_id is not None and not publication.dry_run
    url = push_to_hub(place, publication) if is_pushed else None
    return ExportReport(
        expected.step, str(expected.dtype).removeprefix("torch."), difference, files, url, expected.notes, stops
    )


def _check_size(text: str) -> None:
    """Raise UsageError for a --max-shard-size that huggingface_hub cannot read."""
    if not re.fullmatch(r"0*[1-9]\d*[KMGT]B", text, re.ASCII | re.IGNORECASE):
        raise UsageError(
            f"--max-shard-size {text}: is no size; write a whole number with KB, MB, GB or TB, such as 5GB"
        )


def _rename_synced(partial: Path, output_dir: Path) -> None:
    """Rename the folder once all its files are on the disk. Raises CheckpointError, UsageError."""
    with _as_checkpoint_error(f"--to {output_dir}: cannot be written"):
        # The content before the name: an export that can be seen is complete after a power failure too.
        for path in (*partial.rglob("*"), partial):
            sync_folder(path)
        try:
            os.rename(partial, output_dir)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            problem = "another command has written into it meanwhile, and its files stay"
            raise UsageError(f"--to {output_dir}: {problem}; choose another folder") from error
        sync_folder(output_dir.parent)


@contextmanager
def _as_checkpoint_error(action: str) -> Iterator[None]:
    """Replace errors of the disk and of libraries inside by a CheckpointError."""
    try:
        yield
    except DstrainError:
        raise
    except Exception as error:  # each library has its own error for a full disk
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = (
            "free some space, or choose another folder" if isinstance(error, OSError | SafetensorError) else "report it"
        )
        raise CheckpointError(f"{action} ({reason}); nothing was left there: {fix}") from error


@torch.no_grad()
def _write_export(loaded: LoadedModel, folder: Path, merge_lora: bool, max_shard_size: str, card: str) -> _Expected:
    """Write the export, and return what its reload is compared with.

    Raises CheckpointError if the folder differs from the checkpoint.
    """
    _check_exportable(loaded, merge_lora)
    task, model = loaded.task, loaded.model
    examples = task.examples("eval") or task.examples("train") or []
    if not examples:
        raise UsageError("there is no sample to probe the export with; give some with --set data.eval=FILE")
    probes = task.export.make_probes([examples[index] for index in range(min(NUM_PROBES, len(examples)))])
    # Before the merge, which changes the model in place.
    outputs = [task.export.outputs(unwrap_peft(model), batch).double() for batch in probes]
    answers = answer_probes(task, unwrap_peft(model))
    if loaded.checkpoint is not None:
        check_matches_checkpoint(model, CheckpointReader(loaded.checkpoint))
    whole: Any = merge_adapters(model) if merge_lora else model
    if merge_lora:
        check_params_finite(whole)
    base_names = keep_base_names(whole, task)
    _save_model(whole, folder, task, answers, merge_lora, max_shard_size, card)
    notes = describe_name_changes(whole, base_names, list_tensors(folder)) if base_names else []
    return _Expected(
        task,
        loaded.step,
        next(p.dtype for p in whole.parameters() if p.is_floating_point()),
        probes,
        outputs,
        answers,
        compute_digests(get_state_tensors(whole)),
        notes,
    )


def _save_model(
    model: Any,
    folder: Path,
    task: Task,
    answers: ProbeAnswers | None,
    merge_lora: bool,
    max_shard_size: str,
    card: str,
) -> None:
    """Write weights, tokenizer, generation config, recipe and model card. Raises CheckpointError if the files differ from the model."""
    preload_bitsandbytes()
    from peft import PeftModel
    from transformers import PreTrainedModel

    of_a_library = isinstance(model, PreTrainedModel | PeftModel)
    _check_disk_space(folder, count_bytes(get_export_tensors(model) if of_a_library else get_state_tensors(model)))
    with _as_checkpoint_error(f"{folder.parent}: cannot be written"):
        folder.mkdir(parents=True)
        tokenizer = None if answers is None else answers.source.tokenizer
        write_model_folder(model, folder, task, tokenizer, merge_lora, max_shard_size)
        write_card(folder, card)
        # safetensors writes files that only their owner may read; the recipe has the permissions that the umask gives.
        readable = stat.S_IMODE((folder / EXPORT_RECIPE).stat().st_mode)
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(readable)
        if of_a_library:
            check_exported_files(folder, get_export_tensors(model))  # taken again: for some families it returns copies


def _check_disk_space(folder: Path, size: int) -> None:
    """Raise UsageError if the disk has no room for the weights and the files next to them."""
    free = get_free_bytes(folder)
    if free is not None and free < size + EXTRA_FILES_BYTES:
        raise UsageError(
            f"--to: the weights take {format_bytes(size)}, other files up to {format_bytes(EXTRA_FILES_BYTES)}, but "
            f"{folder.parent} has {format_bytes(free)} free; free some space, or choose another folder"
        )


def _check_exportable(loaded: LoadedModel, merge_lora: bool) -> None:
    """Raise UsageError for a model that cannot be exported as asked."""
    from transformers import PreTrainedModel

    base = loaded.task.recipe.model
    if merge_lora and base.lora is None:
        raise UsageError("--merge-lora: the run has no adapters (model.lora); leave the flag out")
    known = isinstance(unwrap_peft(loaded.model), PreTrainedModel)
    is_merged = read_adapter(base.path) is not None and not (base.lora and not base.lora.create_new_adapter)
    is_in_folder = base.path is not None and base.init is None and not is_merged and known
    if base.lora is not None and not merge_lora and not is_in_folder:
        raise UsageError(
            "the base weights of its adapters are in no folder (model.config, model.init, a custom module, or an adapter "
            "merged into its base), so the adapters could not be loaded; add --merge-lora to write one complete model"
        )


@torch.no_grad()
def _verify_reload(expected: _Expected, folder: Path) -> float:
    """Reload the folder and return the largest output difference. Raises CheckpointError if it is too large."""
    with _as_checkpoint_error("the exported folder cannot be loaded"):
        model = expected.task.export.reload(folder).eval()
    check_loaded_model(model, expected.tensor_digests)
    differences = []
    for mine, batch in zip(expected.outputs, expected.probes, strict=True):
        theirs = expected.task.export.outputs(unwrap_peft(model), batch).double()
        differences.append(((mine - theirs).abs() / mine.abs().clamp(min=1)).reshape(-1))
    worst = float(torch.cat(differences).max())  # nan where one is
    # `not <=`, so that nan fails too.
    if not worst <= TOLERANCE[expected.dtype]:
        raise CheckpointError(
            f"the exported model was reloaded and its outputs differ by {worst:.2g}; nothing was written"
        )
    if expected.answers is not None:
        with _as_checkpoint_error("the exported folder cannot be used to generate"):
            check_answers(expected.answers, folder, unwrap_peft(model), TOLERANCE[expected.dtype])
    return worst
