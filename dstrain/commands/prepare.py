"""dstrain prepare: caches a recipe's tokenized data and reference outputs before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from dstrain.cache import cache_root
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.run_job import Job
from dstrain.commands.trained_model import hash_weights, quiet_libraries
from dstrain.config import RunConfig
from dstrain.config.resolve import DEFAULT_MICRO_BATCH_SIZE, BatchPlan
from dstrain.data.dataset import Dataset
from dstrain.data.prepare import describe_examples
from dstrain.ds_config import Device, resolve_ds_config
from dstrain.errors import DataError
from dstrain.preset import read_preset
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.task import Split, check_sequence_parallel, load_split
from dstrain.units import format_count

if TYPE_CHECKING:
    from dstrain.distributed.world import World


@dataclass(frozen=True)
class PreparedData:
    """The datasets, and the settings of the reference's forward passes."""

    task: Task
    splits: Mapping[Split, Dataset | None]
    micro_batch_size: int
    ds_config: Mapping[str, Any]


@dataclass(frozen=True)
class PrepareJob(Job):
    """A job that builds the token cache of every split, and the outputs of frozen models that the recipe precomputes."""

    request: TrainRequest

    @property
    def is_parallel(self) -> bool:
        """True where a reference or reward model runs: on all processes. One process is enough for tokens."""
        return make_task(resolve_recipe(self.request).config).loss_inputs.caches_outputs

    def to_argv(self) -> list[str]:
        return ["prepare", *self.request.recipe_argv()]

    def check_recipe(self) -> RunConfig:
        config = resolve_recipe(self.request).config
        make_task(config).checks.required_keys()
        read_preset(config.ds_config)
        return config

    def prepare(self, world_size: int, device: Device) -> PreparedData:
        from dstrain.training.engine.base import with_private_nvme_path

        quiet_libraries()
        config = resolve_recipe(self.request).config
        preset = read_preset(config.ds_config)
        # The recipe's batch may be for another number of processes than this command has.
        micro = config.batch.micro or preset.micro or DEFAULT_MICRO_BATCH_SIZE
        ds_config = resolve_ds_config(
            config, preset, BatchPlan(micro * world_size, micro, 1), world_size, device, cache_root()
        )
        task = make_task(config)
        task.checks.run()
        check_sequence_parallel(task)
        if task.loss_inputs.caches_outputs:  # those of frozen models, which run here
            task.checks.device()
        splits = {split: load_split(task, split) for split in get_args(Split)}
        if not splits["train"]:
            raise DataError("data.train: holds no sample to train on; give a file with records that the task can use")
        return PreparedData(task, splits, micro, with_private_nvme_path(ds_config))

    def cache_weight_hashes(self, prepared: PreparedData) -> None:
        hash_weights(prepared.task, include_base=False)

    def run(self, prepared: PreparedData, world: World) -> dict[str, Any]:
        from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select

        job = OutputsJob(
            task=prepared.task, ds_config=prepared.ds_config, micro_batch_size=prepared.micro_batch_size, world=world
        )
        found = add_outputs_and_select(job, prepared.splits)
        splits = {name: split.summarize() for name, split in found.items() if split is not None}
        is_cached = prepared.task.loss_inputs.reference.kind == "cached"
        scorers = {scorer.name: scorer.is_cached for scorer in prepared.task.loss_inputs.scorers}
        return {
            "cache": str(cache_root()),
            "splits": splits,
            "reference": "kept" if is_cached else prepared.task.loss_inputs.reference.kind,
            **({"reward_models": scorers} if scorers else {}),
        }


def show_prepared(summary: Mapping[str, Any]) -> str:
    """Return the summary as text."""
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
        lines += [f"  {line}" for line in describe_examples(split)]
        lines += [f"  {name}: {split['selection']}"] if "selection" in split else []
    said = {"kept": "reference: its outputs for all samples are cached", "none": "reference: none is needed"}
    lines.append(
        said.get(
            summary["reference"],
            "reference: runs during training (options.precompute_ref_log_probs caches its outputs)",
        )
    )
    lines += [
        f"{name} reward model: its scores of all samples are cached" if is_cached
        else f"{name} reward model: runs during training (options.safety.scoring: cached caches its scores)"
        for name, is_cached in summary.get("reward_models", {}).items()
    ]  # fmt: skip
    return "\n".join([*lines, f"cache: {summary['cache']}"])
