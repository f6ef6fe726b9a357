"""Worker functions of the memory tests: tensors that exist beside those that the plan predicts."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dstrain.batch import Batch
from dstrain.config import resolve_batch
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.patches import save_inputs_of_trained_weights
from dstrain.distributed.world import World
from dstrain.models.attention.by_group import blocks_of
from dstrain.models.attention.layout import PackedLayout
from dstrain.models.params import build_param_groups, unwrap_peft, zero3_init
from dstrain.patching import replaced
from dstrain.planner.lines import (
    HEAD_ROWS,
    LAYER_ROWS,
    PlanInputs,
    gradient_overlaps,
    plan_lines,
    state_rows,
    sum_bytes,
)
from dstrain.planner.memory import make_run
from dstrain.planner.shapes import read_shape
from dstrain.planner.workload import Cluster, make_workload
from dstrain.tasks import Task
from dstrain.training.build_model import build_model, build_train_module
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from tests.parity.cases import ds_config, share_sequences, tiny_task, world

SMALL_BUFFERS = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000, "stage3_prefetch_bucket_size": 20_000,
                 "stage3_param_persistence_threshold": 500, "stage3_max_live_parameters": 100_000, "sub_group_size": 150_000}  # fmt: skip
"""Sizes that fit a small model, so that states are most of what is counted."""
SHAPE = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def live_storages() -> dict[int, int]:
    """Return address -> bytes of every tensor's storage that Python can reach, gradients included."""
    return {storage.data_ptr(): storage.nbytes() for storage in _iter_storages()}


def _iter_storages() -> Iterator[torch.UntypedStorage]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            for tensor in _with_gradient(thing):
                if tensor.dim() == 3:  # an activation that a hook's closure still holds: no weight has three dimensions
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() and tensor.device.type == "cpu":
                    yield storage


def _with_gradient(thing: Any) -> Iterator[torch.Tensor]:
    try:
        if not isinstance(thing, torch.Tensor):
            return
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    except ReferenceError:  # a weak proxy whose object is gone
        return


class NewStorages(TorchDispatchMode):
    """Counts the bytes of storages that operations inside make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {storage.data_ptr(): StorageWeakRef(storage) for storage in _iter_storages()}
        self.peak, self.at_peak = 0, [""]
        self.reused: dict[int, tuple[StorageWeakRef, int]] = {}
        """Storages at the address of one that was there before and has ended."""
        self.whole = 0
        """The peak with those."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.live = {place: one for place, one in self.live.items() if not one[0].expired()}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            known = self.known.get(storage.data_ptr())
            if known is None:
                self.live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            elif known.expired():
                self.reused[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        reused = sum(size for reference, size in self.reused.values() if not reference.expired())
        self.whole = max(self.whole, sum(size for _, size in self.live.values()) + reused)
        if (now := sum(size for _, size in self.live.values())) > self.peak:
            self.peak, self.at_peak = now, [str(function), *sorted(str(size) for _, size in self.live.values())[:20]]
        return result


def states(
    kind: str, precision: str = "fp32", accumulate: int = 1, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the bytes of this rank's tensors right before an optimizer step, those that it makes, and the lines."""
    changes = changes or {}
    task = tiny_task("sft", {**changes, "model": {"config": SHAPE, **changes.get("model", {})}})
    optim, ranks = task.recipe.optim, world()
    batches = [make_batch(task.examples("train"), task.collate, [ranks.rank + index], 0) for index in range(accumulate)]
    offloads = "offload" in kind or "nvme" in kind
    settings = {"accumulate": accumulate, "world_size": ranks.size, "clip": optim.clip, "precision": precision,
                "uses_custom_optimizer": optim.name != "adamw" or not offloads, "uses_muon": optim.name == "muon"}  # fmt: skip
    config = ds_config(kind, settings)
    zero = config["zero_optimization"]
    zero.update({name: value for name, value in SMALL_BUFFERS.items() if name in zero})
    if task.recipe.model.lora is not None and "reduce_bucket_size" in zero:
        # Smaller than all gradients: else they stay in the bucket, which is a buffer of the passes.
        zero["reduce_bucket_size"] = 4_000
    before = live_storages()
    with zero3_init(config):
        module = build_train_module(task)
    engine = DeepSpeedEngine(module, build_param_groups(module.model, optim), optim, config, ranks)
    engine.step(batches, lr=1e-3)
    seen: list[dict[int, int]] = []
    in_step: list[NewStorages] = []
    inner = engine.engine.step

    def step() -> None:
        if engine.engine.is_gradient_accumulation_boundary():
            time.sleep(0.1)  # until gloo's thread has dropped the last message
            seen.append(live_storages())
            with NewStorages() as made:
                inner()
            in_step.append(made)
        else:
            inner()

    engine.engine.step = step
    engine.step(batches, lr=1e-3)
    engine.engine.step = inner
    of_passes = _sizes_of_passes(module.model, zero, 4 if precision == "fp32" else 2)
    left_out = of_passes | _sizes_of_tables(module.model)
    found = {place: size for place, size in seen[0].items() if place not in before and size not in left_out}
    lines = predicted_states(task, config, ranks)
    parts = {"moments": _optimizer_state_bytes(engine.engine.optimizer)}
    largest = sorted(found.values(), reverse=True)[:60]
    sub_groups = getattr(engine.engine.optimizer, "fp16_partitioned_groups_flat_numel", [0])
    step = {"measured": in_step[0].peak, "whole": in_step[0].whole, "at": in_step[0].at_peak,
            "predicted": predicted_step(task, config, ranks, max(sub_groups)),
            "again": gathered_again(task, config, ranks)}  # fmt: skip
    return {"measured": sum(found.values()), "largest": largest, "parts": parts, "step": step, "lines": lines}


def _sizes_of_passes(model: torch.nn.Module, zero: Mapping[str, Any], width: int) -> set[int]:
    """Return the sizes of what passes hold and may live on for a while, which the plan counts in lines of its own.

    At stages 1 and 2 a bucket, where gradients are views of it, and a gradient larger than a bucket until the next
    reduction; at stage 0 the message of an all-reduce until its work is collected.
    """
    numbers = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    if zero["stage"] == 3:
        return set()
    if zero["stage"] == 0:
        return {sum(numbers) * width}
    bucket = zero["reduce_bucket_size"]
    if width == 2 or "offload_optimizer" in zero:  # there whole gradients, or buffers as large as one, are states
        return {bucket * width}
    return {bucket * width, *(number * width for number in numbers if number > bucket)}


def _sizes_of_tables(model: torch.nn.Module) -> set[int]:
    """Return the sizes of the two tables of values in each 4-bit layer, 1.1 kB whatever the layer's size: not planned."""
    states = [parameter.quant_state for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    return {table.untyped_storage().nbytes() for state in states for table in (state.code, state.state2.code)}


def _optimizer_state_bytes(optimizer: Any) -> int:
    """Return the bytes of the optimizer's own tensors, without step counters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


def saved_head_bytes(run: PlanInputs) -> int:
    """What autograd keeps of the head between forward and backward pass."""
    if run.workload.is_scored:
        return 0
    inputs = 2 * run.width * run.workload.targets * run.shape.hidden + 8 * run.workload.targets
    return inputs + run.width * run.kept_targets * run.shape.vocab


def planned_run(task: Task, config: dict[str, Any], ranks: World) -> PlanInputs:
    """Return what the planner computes the states of this run from."""
    recipe = task.recipe
    shape = read_shape(recipe)
    workload = make_workload(recipe, shape, resolve_batch(recipe.batch, ranks.size), "cpu")
    return make_run(recipe, shape, workload, config, Cluster(gpus_per_node=ranks.size, kind="cpu"))


def predicted_states(task: Task, config: dict[str, Any], ranks: World) -> list[tuple[str, str, int]]:
    """Return (name, place, bytes) of the lines that this rank holds between the backward pass and the step."""
    run = planned_run(task, config, ranks)
    held = [
        (line.name, line.place, line.num_bytes)
        for line in plan_lines(run, state_rows(run))
        if {"embedding", "all-reduce"} <= {*line.moments}
    ]
    # The plan's line is that of the process with most.
    own = gradient_overlaps(run).get(ranks.rank, 0) * run.width
    return [(name, place, own if name == "gradients across partitions" else size) for name, place, size in held]


def predicted_step(task: Task, config: dict[str, Any], ranks: World, sub_group: int) -> int:
    """Return the bytes that a step makes, with the largest sub-group of this run instead of the largest that can be."""
    run = planned_run(task, config, ranks)
    sizes = {line.name: line.num_bytes for line in plan_lines(run, state_rows(run)) if line.first == "update"}
    if planned := sizes.pop("gradients of a sub-group", 0):
        assert sub_group * run.master_bytes <= planned
        sizes["gradients of a sub-group"] = sub_group * run.master_bytes
    return sum(sizes.values())


def gathered_again(task: Task, config: dict[str, Any], ranks: World) -> int:
    """Return the bytes of the small trained weights: stage 3 frees them in a step and gathers them into new storages."""
    run = planned_run(task, config, ranks)
    limit = run.setting("stage3_param_persistence_threshold", 0) if run.stage == 3 and ranks.size > 1 else 0
    return run.width * sum(
        one.numel * count for one, count in run.shape.kinds if one.is_trainable and one.numel <= limit
    )


def activations(
    changes: dict[str, Any], dtype: str, count: int, name: str = "sft", is_zero3: bool = False
) -> dict[str, float]:
    """Return the bytes that autograd keeps of one forward pass, and those that the plan predicts.

    `is_zero3`: with the linear layers of DeepSpeed's stage 3, as dstrain changes them.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    save_inputs_of_trained_weights()
    # A model in shards that was built before in this process leaves DeepSpeed's function behind.
    linear = zero3_linear_wrap if is_zero3 else torch._C._nn.linear
    changes = {**changes, "model": {**changes.get("model", {}), "dtype": dtype}}
    task = tiny_task(name, changes)
    model = build_model(task)
    share_sequences(world(), task.recipe.parallel.sequence)
    batch = make_batch(task.examples("train"), task.collate, list(range(count)), 0, sequence=world().sequence)
    owned = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address is used twice
        return tensor

    model.train()
    with replaced(torch.nn.functional, "linear", linear):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = task.loss(unwrap_peft(model), batch)
        saved = sum(kept.values())
        loss.total.backward()  # recomputes layers by the same function
    predicted = predicted_activations(task.recipe, batch, 2 if dtype == "bfloat16" else 4)
    return {"measured": saved, **predicted}


def predicted_activations(recipe: RunConfig, batch: Batch, width: int) -> dict[str, float]:
    """Return the lines that autograd keeps, for the tokens and targets of this batch."""
    shape = read_shape(recipe)
    plan = make_workload(recipe, shape, resolve_batch(recipe.batch, 1), "cpu")
    ids = batch.tensors["input_ids"]
    targets = int(batch.tensors["loss_mask"].sum()) if "loss_mask" in batch.tensors else 0
    if batch.sequence is not None:
        targets = len(batch.tensors["target_ids"])
    keys = sum(
        (block.queries.stop - block.queries.start) * sum(one.stop - one.start for one in block.keys)
        for block in blocks_of(PackedLayout(batch.groups), None)
    )
    workload = replace(
        plan, tokens=ids.numel() // plan.sequence, rows=ids.shape[0], targets=targets, is_packed=batch.is_packed,
        keys=keys / ids.numel(),
    )  # fmt: skip
    run = PlanInputs(shape=shape, workload=workload, precision="bf16" if width == 2 else "fp32")
    lines = [line for line in plan_lines(run, LAYER_ROWS) if line.first == "scores"]
    parts = {line.name: float(line.num_bytes) for line in lines}
    if workload.checkpointed:
        # Arguments of the recomputed layers, which a closure keeps and no hook sees.
        del parts["rotary angles"]
    parts["head"] = float(saved_head_bytes(run))
    return {"predicted": sum(parts.values()), **parts}


class LivePeak(TorchDispatchMode):
    """The most bytes of storages that operations inside make and that live at the same time."""

    def __init__(self, model: torch.nn.Module, batch: Batch) -> None:
        super().__init__()
        owned = (*model.parameters(), *model.buffers(), *batch.tensors.values())
        self.known = {one.untyped_storage().data_ptr() for one in owned}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.live = {place: one for place, one in self.live.items() if not one[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                storage = tensor.untyped_storage()
                self.live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def pass_peaks(changes: dict[str, Any], dtype: str, length: int, tokens: list[int]) -> list[dict[str, float]]:
    """Return for each number of tokens the peak of a forward and backward pass over rows of `length`, and the plan's."""
    model = {**changes.get("model", {}), "dtype": dtype}
    found, micro = [], max(tokens) // length
    for number in tokens:
        task = tiny_task(
            "sft", {"batch": {"packing": False, "micro": micro}, "data": {"max_length": length}, "model": model}
        )
        module = build_train_module(task).train()
        ids = torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(0)).int().numpy()
        mask = (torch.arange(length) > 0).int().numpy()
        rows = [{"sample": 0, "input_ids": ids, "loss_mask": mask} for _ in range(number // length)]
        batch = task.collate(rows)
        with LivePeak(module, batch) as live:
            module(batch)[0].backward()
            shape = read_shape(task.recipe)
        plan = make_workload(task.recipe, shape, resolve_batch(task.recipe.batch, 1), "cpu")
        targets = number - len(rows)
        workload = replace(plan, tokens=number, rows=len(rows), targets=targets)
        run = PlanInputs(shape=shape, workload=workload, precision="bf16" if dtype == "bfloat16" else "fp32")
        planned = sum_bytes(plan_lines(run, (*LAYER_ROWS, *HEAD_ROWS)), "gpu")
        found.append({"tokens": number, "measured": live.peak, "planned": planned})
    return found
