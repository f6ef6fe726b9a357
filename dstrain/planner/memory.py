"""Memory plan of a run: what each process needs on its GPU, in host memory and on disk, line by line."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dstrain.config import BatchPlan, RunConfig, resolve_batch
from dstrain.ds_config import Device, resolve_ds_config
from dstrain.errors import Fault, RecipeError
from dstrain.models.quantization import MAX_NUMEL_8BIT, OPTIMIZERS_8BIT
from dstrain.planner.lines import (
    DTYPE_BYTES,
    MemoryLine,
    Moment,
    Place,
    PlanInputs,
    all_lines,
    count_saved_bytes,
    sum_bytes,
)
from dstrain.planner.shapes import ModelShape, read_base_shape, read_shape, reference_shape, with_score_head
from dstrain.planner.workload import Cluster, Workload, has_expandable_segments, make_workload
from dstrain.preset import Preset
from dstrain.resources import list_missing_for_triton


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What one process of a run needs, at its peak."""

    preset: str
    precision: str
    batch: BatchPlan
    cluster: Cluster
    workload: Workload
    shape: ModelShape
    run: PlanInputs
    """What the lines are computed from."""
    lines: tuple[MemoryLine, ...]

    def total(self, place: Place, moment: Moment | None = None) -> int:
        """Return the bytes of one process at a place and a moment (None: at the peak)."""
        return sum_bytes(self.lines, place, moment)

    @property
    def gpu_bytes(self) -> int:
        """Return the peak of one GPU; of one process on a CPU run."""
        return self.total("gpu")

    @property
    def tensor_bytes(self) -> int:
        """Return the peak of tensors on the device: what torch.cuda.max_memory_allocated reports."""
        return self.gpu_bytes - sum(
            line.num_bytes for line in self.lines if line.kind == "reserve" and line.place == "gpu"
        )

    @property
    def host_bytes_per_node(self) -> int:
        """Return the host memory of all processes of a host; on a CPU run their devices' memory too."""
        own = self.total("gpu") if self.cluster.kind == "cpu" else 0
        return (self.total("host") + own) * self.cluster.gpus_per_node

    @property
    def is_offloaded(self) -> bool:
        """True where states are on the host or the disk."""
        return any(line.place != "gpu" and line.kind == "state" for line in self.lines)

    @property
    def nvme_bytes_per_node(self) -> int:
        """Return the disk space of offloaded states on a host."""
        return self.total("nvme") * self.cluster.gpus_per_node

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Return value of `model.kernels` -> bytes that autograd keeps of the decoder.

        Families whose kernels the plan does not know are counted without them (`has_fused_kernels`).
        """
        can_fuse = can_have_fused_kernels(self.shape, self.cluster.kind)
        runs = {"none": False, "liger": can_fuse}
        return {name: count_saved_bytes(replace(self.run, has_fused_kernels=fused)) for name, fused in runs.items()}

    def find(self, name: str) -> MemoryLine | None:
        """Return the first line of this name."""
        return next((line for line in self.lines if line.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, with all lines."""
        return {
            "preset": self.preset,
            "precision": self.precision,
            "micro": self.batch.micro,
            "accumulate": self.batch.accumulate,
            "total": self.batch.total,
            "tokens_per_pass": self.workload.tokens,
            "gpu_bytes": self.gpu_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "nvme_bytes_per_node": self.nvme_bytes_per_node,
            "saved_bytes": self.saved_bytes,
            "lines": [{**asdict(line), "when": line.when} for line in self.lines],
        }


def plan_memory(config: RunConfig, preset: Preset, cluster: Cluster, shape: ModelShape | None = None) -> MemoryPlan:
    """Return the memory plan of a recipe with a preset on these machines. Imports no torch.

    `shape`: the model with its head and adapters as `read_shape` returns it; None: it is read from the recipe. Rows are
    taken to have data.max_length tokens, all of them targets. Raises RecipeError where the model cannot be read, or the
    batch does not fit the processes, and PresetError where the preset does not fit the precision or optimizer.
    """
    shape = shape or read_shape(config)
    sequence = config.parallel.sequence
    batch = resolve_batch(config.batch, cluster.world_size, preset.micro, preset.accumulate, sequence)
    device = Device(cluster.kind, cluster.bf16 or cluster.kind == "cpu")
    ds_config = resolve_ds_config(config, preset, batch, cluster.world_size, device, Path())
    largest = replace(batch, micro=batch.largest_micro(cluster.world_size))
    workload = make_workload(config, shape, largest, cluster.kind)
    run = make_run(config, shape, workload, ds_config, cluster)
    check_8bit_partitions(run)
    return MemoryPlan(
        preset=preset.name, precision=read_precision(ds_config), batch=batch, cluster=cluster, workload=workload, shape=shape,
        run=run, lines=all_lines(run),
    )  # fmt: skip


def make_run(
    config: RunConfig, shape: ModelShape, workload: Workload, ds_config: dict[str, Any], cluster: Cluster
) -> PlanInputs:
    """Return what the lines depend on, from a completed DeepSpeed JSON."""
    precision = read_precision(ds_config)
    own = DTYPE_BYTES[precision]
    reference = reference_shape(shape)
    rewards = (read_base_shape(model) for model in shape.task.reward_models)
    return PlanInputs(
        shape=shape,
        workload=workload,
        precision=precision,
        zero=ds_config["zero_optimization"],
        grad_bytes=_dtype_bytes(ds_config.get("data_types", {}).get("grad_accum_dtype")) or own,
        comm_bytes=_dtype_bytes(ds_config.get("communication_data_type")) or own,
        master_bytes=2 if ds_config.get("bf16", {}).get("bf16_master_weights_and_grads") is True else 4,
        accumulate=ds_config["gradient_accumulation_steps"],
        world_size=cluster.world_size,
        optimizer=config.optim.name,
        quantize=config.model.quantize,
        has_fused_kernels=has_fused_kernels(config, shape, cluster.kind),
        checkpoints_on_host=ds_config.get("activation_checkpointing", {}).get("cpu_checkpointing", False),
        reference_params=0 if reference is None else reference.count(),
        reward_params=sum(with_score_head(reward).count() for reward in rewards if reward is not None),
        prefetch=config.data.prefetch,
        saves_in_background=config.save.background,
        has_bf16=cluster.bf16,
        expandable_segments=has_expandable_segments(os.environ),
    )


def has_fused_kernels(config: RunConfig, shape: ModelShape, device: str) -> bool:
    """Return True where the plan counts with fused kernels in the decoder (`model.kernels`).

    `auto` takes them on GPUs where liger-kernel is installed; the machine that plans stands for the one that trains.
    """
    kernels = config.model.kernels
    if kernels == "none" or not can_have_fused_kernels(shape, device):
        return False
    is_installed = all(find_spec(package) is not None for package in ("liger_kernel", "triton"))
    return kernels == "liger" or (is_installed and not list_missing_for_triton(os.environ))


def can_have_fused_kernels(shape: ModelShape, device: str) -> bool:
    """Return True where the plan knows what fused kernels keep: on GPUs, of the families in the planner's tables.

    Of others some modules may stay eager; the plan counts all of them so.
    """
    return device == "cuda" and shape.param_source == "config"


def check_8bit_partitions(run: PlanInputs) -> None:
    """Raise RecipeError for a partition that an 8-bit optimizer cannot take: the engine refuses it after loading."""
    if run.optimizer not in OPTIMIZERS_8BIT or run.largest_partition < MAX_NUMEL_8BIT:
        return
    problem = f"{run.optimizer} takes {MAX_NUMEL_8BIT - 1} values in one partition, and there would be {run.largest_partition}"
    fix = "use more processes, or ds_config: zero3, whose partitions are divided into groups"
    raise RecipeError(Fault("optim.name", problem, fix))


def read_precision(ds_config: dict[str, Any]) -> str:
    """Return the precision of a completed DeepSpeed JSON."""
    return next((name for name in ("bf16", "fp16") if ds_config[name]["enabled"]), "fp32")


def _dtype_bytes(name: str | None) -> int | None:
    """Return the bytes of a dtype as a DeepSpeed JSON writes it."""
    if name is None:
        return None
    return 4 if "32" in name or name == "float" else 2
