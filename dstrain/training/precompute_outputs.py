"""Precomputed outputs of frozen models (reference, reward models) for every sample, in the cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dstrain.batch import Batch
from dstrain.cache import check_once, load_entry, write_entry
from dstrain.data.dataset import Dataset
from dstrain.data.loading.loader import eval_micro_batches, iter_batches
from dstrain.data.loading.micro_batches import costs_of, make_limits
from dstrain.data.token_store import AlignedStore, TokenizedDataset, TokenStore, open_column
from dstrain.distributed.world import World, data_parallel_rank
from dstrain.errors import DataError, TaskError
from dstrain.files import load_npy
from dstrain.models.params import is_zero3, zero3_init
from dstrain.models.weights import weights_fingerprint
from dstrain.process_setup import log_stdout
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.task import FrozenModel, Split
from dstrain.training.build_model import with_training_dtype
from dstrain.training.engine.base import ForwardEngine
from dstrain.training.engine.module import FrozenModule

CACHE_VERSION = 2
"""Increase it when the same model would give other outputs, so that earlier files are ignored."""
ROWS_PER_ENTRY = 1024
"""Rows of an entry `references/KEY` or `scores/KEY` of the cache: an interrupted job continues after it."""
REFERENCE = "reference"
"""Name of the reference among the frozen models; reward models have those of their scorers."""

OutputColumns = dict[str, np.ndarray]
"""Name -> a number for each row, (rows,) float64; or an array (targets, …) for each row, (rows,) objects."""


@dataclass(frozen=True, kw_only=True)
class OutputsJob:
    """Task, DeepSpeed config, micro-batch size and world for precomputing outputs of its frozen models."""

    task: Task
    ds_config: Mapping[str, Any]
    micro_batch_size: int
    """Samples of a forward pass, where the recipe does not limit its tokens."""
    world: World


@dataclass(frozen=True, kw_only=True)
class ModelJob(OutputsJob):
    """The job of one frozen model. `task` encodes and collates what that model reads."""

    name: str
    model: FrozenModel
    build: Callable[[], torch.nn.Module]
    """Builds the model in the precision of the DeepSpeed config. Collective under ZeRO-3."""


def add_frozen_outputs(job: OutputsJob, splits: Sequence[Dataset | None]) -> list[Dataset | None]:
    """Return each split with the outputs of the task's cached frozen models as columns. Collective.

    Raises TaskError for a task whose dataset is not a token store, DataError for non-finite outputs or
    a cache that cannot be written.
    """
    found = list(splits)
    for model_job in iter_model_jobs(job):
        found = _add_outputs(model_job, found)
    return found


def add_outputs_and_select(job: OutputsJob, splits: Mapping[Split, Dataset | None]) -> dict[Split, Dataset | None]:
    """Return each split with the outputs of `add_frozen_outputs`, without the samples that these leave out. Collective."""
    found = dict(zip(splits, add_frozen_outputs(job, [*splits.values()]), strict=True))
    select = job.task.loss_inputs.select
    if select is None:
        return found
    return {split: None if dataset is None else select(dataset, split) for split, dataset in found.items()}


def iter_model_jobs(job: OutputsJob) -> Iterator[ModelJob]:
    """Yield the job of each frozen model that the task caches."""
    for index, (name, model, task) in enumerate(_list_cached_models(job.task)):
        yield ModelJob(
            name=name, model=model, task=task, build=partial(_build_in_precision, job, index),
            ds_config=job.ds_config, micro_batch_size=job.micro_batch_size, world=job.world,
        )  # fmt: skip


def _list_cached_models(task: Task) -> list[tuple[str, FrozenModel, Task]]:
    """Return name, model and the task that encodes what it reads, of each frozen model whose outputs are cached."""
    inputs = task.loss_inputs
    reference = [(REFERENCE, inputs.reference, task)] if inputs.reference.kind == "cached" else []
    return [*reference, *((scorer.name, scorer, scorer.task) for scorer in inputs.scorers if scorer.is_cached)]


def _build_in_precision(job: OutputsJob, index: int) -> torch.nn.Module:
    task = make_task(with_training_dtype(job.task.recipe, job.ds_config))
    _, model, _ = _list_cached_models(task)[index]
    return model.build()


def _add_outputs(job: ModelJob, splits: Sequence[Dataset | None]) -> list[Dataset | None]:
    """Return each split with the outputs of one model. Collective."""
    wrong = [type(split).__name__ for split in splits if split is not None and not isinstance(split, TokenizedDataset)]
    if wrong:
        raise TaskError(f"cached outputs of a frozen model need examples from a token store, and these are {wrong[0]}")
    datasets = cast("Sequence[TokenizedDataset | None]", splits)
    stores = {store.folder: store for split in datasets if split for store in [_find_store(job, split).store]}
    columns = compute_outputs(job, stores)
    return [None if split is None else _with_outputs(job, split, columns) for split in datasets]


def compute_outputs(job: ModelJob, stores: Mapping[Path, TokenStore]) -> dict[Path, OutputColumns]:
    """Return the outputs of one model for each store, from the cache where they are in it. Collective."""
    # Rank 0 hashes the weights: every rank reading the files of a large model would overload the file system.
    weights = job.world.broadcast(_weights_fingerprint(job) if job.world.rank == 0 else None)
    engine = _LazyEngine(job)
    columns = {folder: _load_or_compute(job, store, weights, engine) for folder, store in stores.items()}
    engine.release()
    return columns


def _find_store(job: ModelJob, split: TokenizedDataset) -> AlignedStore:
    """Return the samples as the model reads them, and their rows."""
    return split.aligned_stores.get(job.name) or AlignedStore(split.store, np.arange(len(split.store)))


def _with_outputs(job: ModelJob, split: TokenizedDataset, columns: Mapping[Path, OutputColumns]) -> TokenizedDataset:
    aligned = _find_store(job, split)
    own = {name: column[aligned.rows] for name, column in columns[aligned.store.folder].items()}
    return replace(split, output_columns={**split.output_columns, **own})


def _weights_fingerprint(job: ModelJob) -> str:
    return weights_fingerprint(job.model.config, job.task.recipe.seed)


def build_cache_key(job: ModelJob, store: TokenStore, weights_digest: str) -> dict[str, Any]:
    """Return everything that the outputs depend on.

    The folder of the store is named after data, tokenizer, template, truncation and processor, and its digest is that
    of the tokens; records only name image files: the digest of the images is added. Whether batches are packed is not
    part of it: the outputs differ by rounding only, as they do with the micro-batch size.
    """
    task = job.task
    precision = with_training_dtype(task.recipe, job.ds_config).model.dtype or "float32"
    in_shards = is_zero3(job.ds_config) and job.model.config.quantize is None
    drawn_in_shards = job.model.config.path is None and precision != "float32" and in_shards
    return {
        "what": job.name,
        "version": CACHE_VERSION,
        "task": task.recipe.task,
        "tokens": store.folder.name,
        "digest": store.digest,
        "images": store.image_index.digest if store.image_index else None,
        "weights": weights_digest,
        "dtype": precision,
        "quantize": job.model.config.quantize,
        "attention": task.recipe.model.attn_implementation,
        "drawn_in_shards": drawn_in_shards,
        **job.model.key,
    }


def _load_or_compute(job: ModelJob, store: TokenStore, weights_digest: str, engine: _LazyEngine) -> OutputColumns:
    """Return the outputs of a whole store; compute and cache those that are missing. Collective."""
    world, key = job.world, build_cache_key(job, store, weights_digest)
    kind = "references" if job.name == REFERENCE else "scores"
    starts = range(0, len(store), ROWS_PER_ENTRY)
    keys = [{**key, "first_row": start, "rows": min(ROWS_PER_ENTRY, len(store) - start)} for start in starts]
    # What rank 0 finds: all ranks must agree on which rows are missing.
    with check_once() as checked:
        found = [load_entry(kind, part, read_columns) if world.rank == 0 else None for part in keys]
        is_missing, checked = world.broadcast(([part is None for part in found], checked))
    missing = sum(is_missing)
    if missing and world.rank == 0:
        count = missing * ROWS_PER_ENTRY if missing < len(starts) else len(store)
        log_stdout(f"{job.name}: {count} samples to compute")
    parts = []
    for start, part, columns, is_computed in zip(starts, keys, found, is_missing, strict=True):
        if is_computed:
            columns = _compute_outputs(job, store, start, engine)
            if world.rank == 0:
                write_entry(kind, part, partial(write_columns, columns=columns))
                log_stdout(f"{job.name}: {min(start + ROWS_PER_ENTRY, len(store))} of {len(store)} samples")
        if columns is None or (is_computed and any(map(is_ragged, columns.values()))):
            # Arrays of a file are mapped: the processes of a host have them in memory once.
            with check_once(checked):
                columns = load_entry(kind, part, read_columns) or columns
        if world.any(columns is None):  # of a host with a cache of its own
            columns = world.broadcast(columns)
        parts.append(cast("OutputColumns", columns))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _compute_outputs(job: ModelJob, store: TokenStore, first_row: int, engine: _LazyEngine) -> OutputColumns:
    """Compute the outputs of one entry of rows; each rank takes a share, in batches of like length. Collective."""
    rows = np.arange(first_row, min(first_row + ROWS_PER_ENTRY, len(store)))
    lengths = store.sequence_lengths
    costs = None if lengths is None else costs_of(lengths, job.task.loss_inputs.packing())
    limits = make_limits(job.task.recipe.batch, job.micro_batch_size, costs)
    # As in an evaluation: largest first, so that an out-of-memory error comes at the start.
    rank, size = data_parallel_rank(job.world)
    mine = [
        rows[chunk].tolist()
        for chunk in eval_micro_batches(len(rows), limits, size, rank, costs and (lambda places: costs(rows[places])))
    ]
    outputs: dict[str, list[Any]] = {}
    pin_memory = job.task.recipe.data.pin and job.world.device.type == "cuda"
    for batch in iter_batches(store, job.task.collate, mine, job.world.sequence, pin_memory):
        for name, column in engine.get()(batch).items():
            outputs.setdefault(name, []).extend([] if batch.is_filler else _values_of_samples(column, batch))
    shares = job.world.gather(([row for chunk in mine for row in chunk], outputs))
    if job.world.sequence is not None:  # its processes have computed the same
        shares = shares[:: job.world.sequence.size]
    # Each rank had other rows, in the order of their length: back to the store's order.
    positions = np.concatenate([np.array(rank_rows, dtype=np.int64) for rank_rows, _ in shares]) - first_row
    found = {}
    for name in outputs:
        values = [value for _, columns in shares for value in columns[name]]
        found[name] = make_column([values[at] for at in np.argsort(positions)])
        is_finite = np.array([bool(np.isfinite(value).all()) for value in found[name]])
        if not is_finite.all():
            problem = f"the {job.name} model's {name} of samples {rows[~is_finite][:8].tolist()} is not finite"
            raise DataError(f"{problem}; check its weights and precision")
    return found


def _values_of_samples(column: torch.Tensor, batch: Batch) -> list[float] | list[np.ndarray]:
    """Return the output of each sample, (B,) -> B numbers; (B, K, …) -> B arrays (targets, …) in 32 bits."""
    if column.dim() == 1:
        # float64 on the host: sums of many log-probabilities, written once.
        return column.double().tolist()
    values = column.float() if column.is_floating_point() else column.int()
    targets = batch.tensors["loss_mask"].cpu() != 0  # (B, K)
    return [row[own].numpy() for row, own in zip(values.cpu(), targets, strict=True)]


def make_column(values: Sequence[float] | Sequence[np.ndarray]) -> np.ndarray:
    """Return a column of numbers, or of arrays of different lengths as objects."""
    if not isinstance(values[0], np.ndarray):
        return np.array(values, dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # at once, numpy would look for a common shape
        column[row] = value
    return column


def is_ragged(column: np.ndarray) -> bool:
    """Return True where a column has an array for each row."""
    return column.dtype == object


class _LazyEngine:
    """Engine of a frozen model, built on first use: a full cache builds no model."""

    def __init__(self, job: ModelJob) -> None:
        self._job = job
        self._engine: ForwardEngine | None = None

    def get(self) -> ForwardEngine:
        """Return the engine. The first call builds it and is collective."""
        if self._engine is None:
            job = self._job
            with zero3_init(job.ds_config):
                model = job.build()
            self._engine = ForwardEngine(FrozenModule(job.model, model), job.ds_config, job.world)
        return self._engine

    def release(self) -> None:
        """Free the memory of the engine."""
        if self._engine is None:
            return
        self._engine = None
        gc.collect()  # DeepSpeed engines are part of reference cycles, with all their memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


ENDS = ".ends"
"""End of the name of a file with the ends of the rows in a column of arrays."""


def read_columns(folder: Path) -> OutputColumns:
    """Return the columns of one entry of the cache; arrays are mapped into memory. Raises OSError or ValueError."""
    files = {path.stem: path for path in sorted(folder.glob("*.npy"))}
    columns: OutputColumns = {}
    for name, path in files.items():
        if name + ENDS in files:
            ends = load_npy(files[name + ENDS])
            columns[name] = make_column(np.split(open_column(path), ends[:-1]))
        elif not name.endswith(ENDS):
            columns[name] = load_npy(path)
    return columns


def write_columns(folder: Path, columns: OutputColumns) -> None:
    """Write the columns of one entry into a folder."""
    for name, column in columns.items():
        if is_ragged(column):
            np.save(folder / f"{name}{ENDS}.npy", np.cumsum([len(value) for value in column]))
            column = np.concatenate(column)
        np.save(folder / f"{name}.npy", column)
