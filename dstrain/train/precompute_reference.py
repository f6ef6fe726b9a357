"""A reference's answers for every sample, computed once on all processes and kept in the cache.

references/KEY/rows-00000000.npz    the columns of 1024 examples, written whole; a run that died goes on behind it
"""

from __future__ import annotations

import gc
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dstrain.cache_dir import cache_root, key_name, partial_path, write_whole
from dstrain.data.cache.dataset import Examples
from dstrain.data.cache.token_store import TokenStore
from dstrain.data.loading.loader import read_shares
from dstrain.data.loading.sampler import by_length, deal
from dstrain.distributed.world import World
from dstrain.errors import DataError, TaskError
from dstrain.models.weights.fingerprint import fingerprint
from dstrain.models.zero3 import sharded, sharded_construction
from dstrain.tasks import Task, make_task
from dstrain.train.build_model import in_precision
from dstrain.train.engine.inference import ForwardEngine
from dstrain.train.engine.module import Reference

VERSION = 1
"""Raise it when the same reference would give other answers: what was kept before is then left alone."""
ROWS = 1024

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a reference is asked."""

    task: Task
    ds_config: Mapping[str, Any]
    micro: int
    world: World


def add_references(asking: Asking, splits: Sequence[Sequence[Any] | None]) -> list[Sequence[Any] | None]:
    """The examples of each split with the reference's answers in them, where the task keeps them. Collective.

    Raises TaskError for a task whose examples are no token store.
    """
    if asking.task.reference != "cached":
        return list(splits)
    wrong = [type(split).__name__ for split in splits if split is not None and not isinstance(split, Examples)]
    if wrong:
        raise TaskError(f"a cached reference needs examples from a token store, and these are {wrong[0]}")
    stores = {split.store.folder: split.store for split in cast("Sequence[Examples]", splits) if split is not None}
    weights = asking.world.broadcast(_weights(asking.task) if asking.world.rank == 0 else None)
    engine = _LateEngine(asking)
    columns = {folder: _columns(asking, store, weights, engine) for folder, store in stores.items()}
    engine.drop()
    return [_with_answers(split, columns) for split in splits]


def _with_answers(split: Sequence[Any] | None, columns: Mapping[Path, Columns]) -> Sequence[Any] | None:
    if not isinstance(split, Examples):
        return split
    return cast("Sequence[Any]", replace(split, answers=columns[split.store.folder]))


def _weights(task: Task) -> str:
    return fingerprint(task.reference_model, task.recipe.seed)


def reference_key(asking: Asking, store: TokenStore, weights: str) -> dict[str, Any]:
    """All that the answers depend on.

    The store's name stands for data, tokenizer, template and truncation, and for a model that sees for its processor;
    what its images show is not in it, for records name files.
    """
    task = asking.task
    precision = in_precision(task.recipe, asking.ds_config).model.dtype or "float32"
    drawn_in_shards = task.reference_model.path is None and precision != "float32" and sharded(asking.ds_config)
    return {
        "what": "reference", "version": VERSION, "task": task.recipe.task, "tokens": store.folder.name,
        "weights": weights, "dtype": precision, "attention": task.recipe.model.attention, "drawn_in_shards": drawn_in_shards,
        **({"images": store.album.digest} if store.album else {}),
    }  # fmt: skip


def _columns(asking: Asking, store: TokenStore, weights: str, engine: _LateEngine) -> Columns:
    """The answers for a whole store, from the cache as far as they are there. Collective."""
    world, key = asking.world, reference_key(asking, store, weights)
    place = cache_root() / "references" / key_name(key)
    starts = range(0, len(store), ROWS)
    kept = world.broadcast([_read(place, start, store) for start in starts] if world.rank == 0 else None)
    missing = sum(part is None for part in kept)
    if missing and world.rank == 0:
        print(f"reference: {missing * ROWS if missing < len(starts) else len(store)} samples to ask for", flush=True)
    for index, start in enumerate(starts):
        if kept[index] is None:
            kept[index] = _ask(asking, store, start, engine)
            if world.rank == 0:
                _write(place, start, kept[index], key)
                print(f"reference: {min(start + ROWS, len(store))} of {len(store)} samples", flush=True)
    return {name: np.concatenate([part[name] for part in kept]) for name in kept[0]}


def _ask(asking: Asking, store: TokenStore, start: int, engine: _LateEngine) -> Columns:
    """The answers for up to ROWS examples, each rank a share, of like length together. Collective."""
    rows = np.arange(start, min(start + ROWS, len(store)))
    order = rows[by_length(store.longest(rows))]
    passes = -(-len(order) // (asking.micro * asking.world.size))
    mine = [chunk.tolist() for chunk in deal(order, passes, asking.world.size, asking.world.rank)]
    answers: dict[str, list[float]] = {}
    for batch in read_shares(cast("Sequence[Any]", store), asking.task.collate, mine):
        for name, column in engine.get()(batch).items():
            answers.setdefault(name, []).extend([] if batch.filler else column.double().tolist())
    told = asking.world.gather(([row for share in mine for row in share], answers))
    places = np.concatenate([np.array(of_rank, dtype=np.int64) for of_rank, _ in told]) - start
    found = {}
    for name in answers:
        found[name] = np.empty(len(rows))
        found[name][places] = np.concatenate([columns[name] for _, columns in told])
        if not np.isfinite(found[name]).all():
            where = rows[~np.isfinite(found[name])][:8].tolist()
            raise DataError(
                f"the reference's {name} of samples {where} is not finite; look at its weights and precision"
            )
    return found


class _LateEngine:
    """The reference's engine, made when it is first asked, so that a full cache builds no model."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._engine: ForwardEngine | None = None

    def get(self) -> ForwardEngine:
        """Collective at the first call."""
        if self._engine is None:
            asking = self._asking
            task = make_task(in_precision(asking.task.recipe, asking.ds_config))
            with sharded_construction(asking.ds_config):
                model = task.build_reference()
            self._engine = ForwardEngine(Reference(task, model), asking.ds_config, asking.world)
        return self._engine

    def drop(self) -> None:
        self._engine = None
        gc.collect()  # engines hang in cycles, with all their memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _read(place: Path, start: int, store: TokenStore) -> Columns | None:
    """One file of answers; None where it is absent or damaged."""
    try:
        with np.load(place / f"rows-{start:08d}.npz", allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    whole = all(len(column) == min(ROWS, len(store) - start) for column in columns.values())
    return columns if columns and whole else None


def _write(place: Path, start: int, columns: Columns, key: Mapping[str, Any]) -> None:
    """Whole or not at all. Raises DataError where the cache cannot be written."""
    final = place / f"rows-{start:08d}.npz"
    partial = partial_path(final)
    try:
        write_whole(place / "key.json", json.dumps(key, indent=1))
        with partial.open("wb") as file:
            np.savez(file, **columns)  # type: ignore[arg-type]  # its stub takes a column for a flag
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)
    except OSError as error:
        raise DataError(f"{place} cannot be written ({error.strerror}); set DSTRAIN_CACHE to another folder") from error
