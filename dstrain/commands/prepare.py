"""dstrain prepare: all of a recipe's data made ready, so that training starts at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.cache_dir import cache_root
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.trained_model import DEFAULT_MICRO_BATCH_SIZE, hash_weights, quiet_libraries
from dstrain.config import RunConfig
from dstrain.config.resolve import BatchPlan
from dstrain.data.encoding.truncation import describe_cuts
from dstrain.errors import DataError
from dstrain.preset import Device, read_preset
from dstrain.tasks import Task, make_task
from dstrain.train.ds_config import resolve_ds_config
from dstrain.units import format_count

if TYPE_CHECKING:
    from dstrain.distributed.world import World

MAX_LISTED_RECORDS = 10
"""Skipped records that are named."""


@dataclass(frozen=True)
class PreparedData:
    """The samples, and whom a reference is asked with."""

    task: Task
    splits: Mapping[str, Sequence[Any] | None]
    micro_batch_size: int
    ds_config: Mapping[str, Any]


@dataclass(frozen=True)
class PrepareJob:
    """Tokens of every split, and a reference's answers where the recipe has them kept."""

    request: TrainRequest

    @property
    def is_parallel(self) -> bool:
        """One process makes the tokens while others would wait; a reference is asked by all."""
        return make_task(resolve_recipe(self.request).config).reference_kind == "cached"

    def to_argv(self) -> list[str]:
        return ["prepare", *self.request.recipe_argv()]

    def check_recipe(self) -> RunConfig:
        config = resolve_recipe(self.request).config
        make_task(config).check_required_keys()
        read_preset(config.ds_config)
        return config

    def prepare(self, world_size: int, device: Device) -> PreparedData:
        from dstrain.train.engine.inference import with_private_nvme_path

        quiet_libraries()
        config = resolve_recipe(self.request).config
        preset = read_preset(config.ds_config)
        # Not the batches of training, which may be for another number of processes.
        micro = config.batch.micro or preset.micro or DEFAULT_MICRO_BATCH_SIZE
        ds_config = resolve_ds_config(
            config, preset, BatchPlan(micro * world_size, micro, 1), (world_size, device), cache_root()
        )
        task = make_task(config)
        task.check()
        splits = {"train": task.examples("train"), "eval": task.examples("eval")}
        if not splits["train"]:
            raise DataError("data.train: holds no sample to train on; give a file with records that the task can use")
        return PreparedData(task, splits, micro, with_private_nvme_path(ds_config))

    def cache_weight_hashes(self, prepared: PreparedData) -> None:
        hash_weights(prepared.task, include_base=False)

    def run(self, prepared: PreparedData, world: World) -> dict[str, Any]:
        from dstrain.train.precompute_reference import ReferenceJob, add_reference_outputs

        asking = ReferenceJob(
            task=prepared.task, ds_config=prepared.ds_config, micro_batch_size=prepared.micro_batch_size, world=world
        )
        add_reference_outputs(asking, list(prepared.splits.values()))
        splits = {name: _summarize_split(split) for name, split in prepared.splits.items() if split is not None}
        kept = prepared.task.reference_kind == "cached"
        return {
            "cache": str(cache_root()),
            "splits": splits,
            "reference": "kept" if kept else prepared.task.reference_kind,
        }


def _summarize_split(examples: Sequence[Any]) -> dict[str, Any]:
    """What a split holds; of a task's own samples only how many."""
    about: dict[str, Any] = {"samples": len(examples)}
    store, rows = getattr(examples, "store", None), getattr(examples, "rows", None)
    if store is not None and rows is not None:
        lengths = [store.lengths(name)[rows] for name in store.ragged_columns if name not in ("learnt", "images")]
        about |= {
            "tokens": int(sum(column.sum() for column in lengths)),
            "longest": int(max(column.max() for column in lengths)),
            "tokens_folder": str(store.folder),
        }
        shown = (
            {image for row in rows.tolist() for image in store[row].get("images", ())} if store.image_index else set()
        )
        about |= {"images": len(shown), "copies": sum(image.has_copy for image in shown)} if shown else {}
    return about | getattr(examples, "report", {})


def show_prepared(summary: Mapping[str, Any]) -> str:
    """What is there, for people."""
    lines = []
    for name, split in summary["splits"].items():
        size = (
            f", {format_count(split['tokens'])} tokens, the longest sequence {split['longest']}"
            if "tokens" in split
            else ""
        )
        lines.append(f"{name}: {split['samples']} samples{size}")
        if "images" in split:
            lines.append(f"  {split['images']} images, {split['copies']} of them as copies in the cache")
        if cuts := describe_cuts(split):
            lines.append(f"  {cuts}")
        if split.get("skipped"):
            lines.append(f"  {split['skipped']} of {split['read']} records skipped:")
            named = split["skipped_records"]
            lines += [f"    {record}" for record in named[:MAX_LISTED_RECORDS]]
            lines += (
                [f"    … and {split['skipped'] - MAX_LISTED_RECORDS} more"]
                if split["skipped"] > MAX_LISTED_RECORDS
                else []
            )
    said = {"kept": "reference: its answers to all samples are kept", "none": "reference: none is needed"}
    lines.append(
        said.get(summary["reference"], "reference: asked during training (options.precompute_ref_log_probs keeps it)")
    )
    return "\n".join([*lines, f"cache: {summary['cache']}"])
