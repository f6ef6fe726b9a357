"""Smaller micro-batches after an out-of-memory error, recorded for the next start."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.config import BatchPlan, Recipe, RunConfig, dump_recipe
from dstrain.config.schema import BatchConfig
from dstrain.distributed.world import Ranks
from dstrain.errors import RunError
from dstrain.files import atomic_write

FILE_NAME = "micro_batch.json"


@dataclass(frozen=True, kw_only=True)
class ReducedBatch:
    """Content of micro_batch.json: the recipe's batch, and the one that takes its place in this run folder.

    It holds as long as batch, preset and number of processes are those that ran out of memory: with other ones the
    recipe counts again.
    """

    recipe: dict[str, Any]
    """`batch` of the recipe as the user wrote it, resolved."""
    preset: str
    world_size: int
    batch: dict[str, Any]
    """`batch` to train with."""
    step: int
    """Steps taken before the memory ran out."""
    between: list[dict[str, Any]] = field(default_factory=list)
    """Earlier values of `batch`, each of which ran out of memory too; a launch may have begun with one."""

    def fits(self, config: RunConfig, world_size: int) -> bool:
        """Return True for a recipe that this file is about, also where it was applied already."""
        known = [_sizes(one) for one in (self.recipe, *self.between, self.batch)]
        same_place = (config.ds_config, world_size) == (self.preset, self.world_size)
        return same_place and _sizes(config.batch.model_dump(mode="json")) in known

    def is_in_use(self, config: RunConfig) -> bool:
        """Return True for a recipe to which the smaller batch was applied."""
        return _sizes(config.batch.model_dump(mode="json")) == _sizes(self.batch)


def _sizes(batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` without the reaction to a failure, which is the user's to change."""
    return {key: value for key, value in batch.items() if key != "on_oom"}


def read_reduced_batch(run_dir: Path) -> ReducedBatch | None:
    """Return the file's content; None without a file. Raises RunError for one that is not readable."""
    path = run_dir / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        for batch in (values["recipe"], values["batch"], *values.get("between", ())):
            BatchConfig.model_validate(batch)
        return ReducedBatch(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR):
            return None  # of the run folder, whose own check says so
        what = f"{path}: is not readable ({type(error).__name__}); remove it to train with the recipe's batch.micro"
        raise RunError(what) from error


def apply_reduced_batch(recipe: Recipe, run_dir: Path, world_size: int, resume: str) -> Recipe:
    """Return the recipe with the smaller micro-batch of its run folder, if there is one; `resume` is --resume.

    A new run (`--resume never`) begins with the recipe's own.
    """
    reduced = None if resume == "never" else read_reduced_batch(run_dir)
    if reduced is None or not reduced.fits(recipe.config, world_size):
        return recipe
    batch = BatchConfig.model_validate(reduced.batch | {"on_oom": recipe.config.batch.on_oom})
    return replace(recipe, config=recipe.config.model_copy(update={"batch": batch}))


def use_batch_of_rank_0(config: RunConfig, world: Ranks) -> RunConfig:
    """Return the recipe with rank 0's `batch`: a network file system may show an old file to other hosts. Collective."""
    batch = world.gather(config.batch.model_dump(mode="json"))[0]
    return config.model_copy(update={"batch": BatchConfig.model_validate(batch)})


def write_reduced_batch(run_dir: Path, config: RunConfig, batch: BatchPlan, world_size: int, step: int) -> RunConfig:
    """Write the file and recipe.yaml for a smaller micro-batch; return the recipe with it.

    `config` is the recipe of the run so far. Ranks that write at the same time write the same.
    """
    new_config = config.model_copy(update={"batch": batch.to_config(config.batch)})
    try:
        earlier = read_reduced_batch(run_dir)
    except RunError:  # it is replaced
        earlier = None
    written, between = config.batch.model_dump(mode="json"), list[dict[str, Any]]()
    new_batch = new_config.batch.model_dump(mode="json")
    if earlier is not None and earlier.fits(config, world_size):
        # Another rank may have written the new batch already.
        written, between = earlier.recipe, [one for one in (*earlier.between, earlier.batch) if one != new_batch]
    reduced = ReducedBatch(
        recipe=written,
        preset=config.ds_config,
        world_size=world_size,
        batch=new_batch,
        step=step,
        between=between,
    )
    atomic_write(run_dir / FILE_NAME, json.dumps(asdict(reduced), indent=2) + "\n")
    atomic_write(run_dir / "recipe.yaml", dump_recipe(new_config))
    return new_config


def describe_reduction(before: BatchPlan, after: BatchPlan) -> str:
    """Return `batch.micro 8 -> 4`."""
    parts = []
    if after.tokens is not None:
        parts.append(f"batch.tokens_per_micro {before.tokens} -> {after.tokens}")
    if after.micro != before.micro:
        parts.append(f"batch.micro {before.micro} -> {after.micro}")
    return ", ".join(parts)


@dataclass
class MicroBatchSize:
    """Sizes of a run's forward passes now, alike on every rank."""

    config: RunConfig
    """Recipe with these sizes."""
    plan: BatchPlan
    world_size: int
    run_dir: Path

    def find_reduced(self, samples: Sequence[int] = ()) -> BatchPlan | None:
        """Return the plan with half the micro-batch; None if the recipe says stop, or no pass can be reduced.

        `samples`: the numbers of samples of the passes that failed, where they are known.
        """
        if self.config.batch.on_oom == "stop" or any(count <= 1 for count in samples):
            return None
        return self.plan.half(self.world_size)

    def store(self, reduced: BatchPlan, step: int) -> str:
        """Write the smaller micro-batch into the run folder, for later starts; return `batch.micro 8 -> 4`.

        `step`: steps taken so far. Ranks that call it at the same time write the same.
        """
        write_reduced_batch(self.run_dir, self.config, reduced, self.world_size, step)
        return describe_reduction(self.plan, reduced)

    def use(self, reduced: BatchPlan) -> None:
        """Use the smaller micro-batch from now on."""
        self.config = self.config.model_copy(update={"batch": reduced.to_config(self.config.batch)})
        self.plan = reduced
