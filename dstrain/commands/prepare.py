"""dstrain prepare: all of a recipe's data made ready, so that training starts at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.commands.recipe_args import Wish, resolve_wish
from dstrain.commands.trained_model import MICRO, hash_weights, quieten
from dstrain.config import RunConfig
from dstrain.config.resolve import BatchPlan
from dstrain.data.cache.token_store import cache_root
from dstrain.data.encoding.truncation import show_cuts
from dstrain.errors import DataError
from dstrain.preset import Device, read_preset
from dstrain.tasks import Task, make_task
from dstrain.train.ds_config import resolved_ds_config
from dstrain.units import show_count

if TYPE_CHECKING:
    from dstrain.distributed.world import World

NAMED = 10
"""Skipped records that are named."""


@dataclass(frozen=True)
class Prepared:
    """The samples, and whom a reference is asked with."""

    task: Task
    splits: Mapping[str, Sequence[Any] | None]
    micro: int
    ds_config: Mapping[str, Any]


@dataclass(frozen=True)
class Prepare:
    """Tokens of every split, and a reference's answers where the recipe has them kept."""

    wish: Wish

    @property
    def many(self) -> bool:
        """One process makes the tokens while others would wait; a reference is asked by all."""
        return make_task(resolve_wish(self.wish).config).reference == "cached"

    def words(self) -> list[str]:
        return ["prepare", *self.wish.recipe_words()]

    def check(self) -> RunConfig:
        config = resolve_wish(self.wish).config
        make_task(config).check_named()
        read_preset(config.ds_config)
        return config

    def ready(self, processes: int, device: Device) -> Prepared:
        from dstrain.train.engine.inference import apart

        quieten()
        config = resolve_wish(self.wish).config
        preset = read_preset(config.ds_config)
        # Not the batches of training, which may be for another number of processes.
        micro = config.batch.micro or preset.micro or MICRO
        ds_config = resolved_ds_config(
            config, preset, BatchPlan(micro * processes, micro, 1), (processes, device), cache_root()
        )
        task = make_task(config)
        task.check()
        splits = {"train": task.examples("train"), "eval": task.examples("eval")}
        if not splits["train"]:
            raise DataError("data.train: holds no sample to train on; give a file with records that the task can use")
        return Prepared(task, splits, micro, apart(ds_config))

    def read_weights(self, ready: Prepared) -> None:
        hash_weights(ready.task, adapted=False)

    def run(self, ready: Prepared, world: World) -> dict[str, Any]:
        from dstrain.train.precompute_reference import Asking, add_references

        asking = Asking(task=ready.task, ds_config=ready.ds_config, micro=ready.micro, world=world)
        add_references(asking, list(ready.splits.values()))
        splits = {name: _describe(split) for name, split in ready.splits.items() if split is not None}
        kept = ready.task.reference == "cached"
        return {"cache": str(cache_root()), "splits": splits, "reference": "kept" if kept else ready.task.reference}


def _describe(examples: Sequence[Any]) -> dict[str, Any]:
    """What a split holds; of a task's own samples only how many."""
    about: dict[str, Any] = {"samples": len(examples)}
    store, rows = getattr(examples, "store", None), getattr(examples, "rows", None)
    if store is not None and rows is not None:
        lengths = [store.lengths(name)[rows] for name in store.sequences if name not in ("learnt", "images")]
        about |= {
            "tokens": int(sum(column.sum() for column in lengths)),
            "longest": int(max(column.max() for column in lengths)),
            "tokens_folder": str(store.folder),
        }
        shown = {image for row in rows.tolist() for image in store[row].get("images", ())} if store.album else set()
        about |= {"images": len(shown), "copies": sum(image.copied for image in shown)} if shown else {}
    return about | getattr(examples, "report", {})


def show_prepared(told: Mapping[str, Any]) -> str:
    """What is there, for people."""
    lines = []
    for name, split in told["splits"].items():
        size = (
            f", {show_count(split['tokens'])} tokens, the longest sequence {split['longest']}"
            if "tokens" in split
            else ""
        )
        lines.append(f"{name}: {split['samples']} samples{size}")
        if "images" in split:
            lines.append(f"  {split['images']} images, {split['copies']} of them as copies in the cache")
        if cuts := show_cuts(split):
            lines.append(f"  {cuts}")
        if split.get("skipped"):
            lines.append(f"  {split['skipped']} of {split['read']} records skipped:")
            named = split["skipped_records"]
            lines += [f"    {record}" for record in named[:NAMED]]
            lines += [f"    … and {split['skipped'] - NAMED} more"] if split["skipped"] > NAMED else []
    said = {"kept": "reference: its answers to all samples are kept", "none": "reference: none is needed"}
    lines.append(
        said.get(told["reference"], "reference: asked during training (options.precompute_ref_log_probs keeps it)")
    )
    return "\n".join([*lines, f"cache: {told['cache']}"])
