"""DeepSpeed engine: forward, backward, step and state at any ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import OptimConfig
from dstrain.distributed.patches import (
    accumulate_without_casts,
    disable_muon_compile,
    drop_gradients_after_overflow,
    find_overflow_by_norm,
    flatten_gradients_in_fp32,
    keep_unaligned_gradients,
    queue_waits_for_persistent_weights,
    queue_waits_for_reduction,
    read_norm_once,
    replay_bias_correction,
    unite_partial_offload,
    use_foreach_norms,
    use_foreach_reduction,
    use_foreach_step,
    without_order_checks,
)
from dstrain.distributed.world import World
from dstrain.models.gradient_checkpointing import offload_activation_checkpoints
from dstrain.models.params import ParamGroup, init_deepspeed
from dstrain.models.tiles import use_leaf_modules
from dstrain.training.engine.base import Engine
from dstrain.training.engine.module import (
    OPTIMIZER_UPDATE,
    StepAccumulator,
    TrainModule,
    describe_pass,
    scale_loss_or_nan,
    set_lr,
    step_outcome,
    with_scores,
    with_step_stats,
)
from dstrain.training.engine.optimizers import allocate_state, make_optimizer
from dstrain.training.state.files import CheckpointReader

COUNTERS = ("global_steps", "skipped_steps")
"""Counters of DeepSpeed's engine that a checkpoint holds."""


class DeepSpeedEngine(Engine):
    """DeepSpeed at any ZeRO stage; takes the same step as TorchEngine."""

    def __init__(
        self,
        train_module: TrainModule,
        param_groups: Sequence[ParamGroup],
        optim: OptimConfig,
        ds_config: Mapping[str, Any],
        world: World,
    ) -> None:
        import deepspeed

        init_deepspeed()
        super().__init__(train_module, param_groups, optim)
        self.world = world
        zero = ds_config["zero_optimization"]
        if zero["stage"]:
            disable_muon_compile()  # else `initialize` imports torch's compiler
        offload = zero.get("offload_optimizer", {}).get("device", "none")
        optimizer = make_optimizer(param_groups, optim, None if offload == "none" else offload, world.device)
        # In fp32 without ZeRO, DeepSpeed has no gradient norm, writes inf and nan into the weights, and cannot clip a
        # gradient that was dropped. There the norm is computed and the gradient clipped here.
        self._max_grad_norm = (
            None if zero["stage"] or ds_config.get("bf16", {}).get("enabled") else optim.clip or math.inf
        )
        if ds_config.get("activation_checkpointing", {}).get("cpu_checkpointing"):
            offload_activation_checkpoints(train_module.model, pin_memory=world.device.type == "cuda")
        if zero["stage"] == 3:
            use_leaf_modules(train_module)
        read_norm_once()
        # DeepSpeed's own clipping fails there on a gradient that is None.
        config = {**ds_config, "gradient_clipping": 0.0} if self._max_grad_norm else dict(ds_config)
        self.engine, *_ = deepspeed.initialize(model=train_module, optimizer=optimizer, config=config)
        self.module = self.engine
        self.is_sharded = zero["stage"] == 3
        # ZeRO reduces a gradient in its weight's hook, and adds what the ranks have at the same place of a bucket.
        self.needs_all_gradients = zero["stage"] > 0
        # Only an optimizer whose state is on NVMe has a swapper.
        if swapper := getattr(self.engine.optimizer, "optimizer_swapper", None):
            keep_unaligned_gradients(swapper)
        if offload != "none":
            unite_partial_offload(self.engine.optimizer)
            drop_gradients_after_overflow(self.engine.optimizer)
        if self.is_sharded:
            queue_waits_for_persistent_weights(self.engine.optimizer)
        find_overflow_by_norm(self.engine.optimizer)
        queue_waits_for_reduction(self.engine.optimizer)
        flatten_gradients_in_fp32(self.engine.optimizer)
        use_foreach_norms(self.engine.optimizer)
        use_foreach_step(self.engine.optimizer)
        accumulate_without_casts(self.engine.optimizer)
        use_foreach_reduction(self.engine, world.size)
        self._unsharded_optimizer = None if zero["stage"] else optimizer
        if not zero["stage"]:
            # In bf16 DeepSpeed takes a step with zero gradients to allocate Adam's state, which then counts from 2:
            # the first real update would be 0.74 of what it should be (fp16/unfused_optimizer.py).
            optimizer.state.clear()

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    def step(self, batches: Sequence[Batch], lr: float, weight: float | None = None) -> StepResult:
        batches, weight = self._prepare_step(batches, weight)
        # In every step: the optimizer is built with lr 0 (see make_optimizer).
        set_lr(self.engine.optimizer, self._lr_scales, lr)
        sums = StepAccumulator()
        # DeepSpeed averages gradients over the ranks, and the step is a sum: hence the factor world.size.
        norm = self._run_passes(batches, self.world.size / weight, sums)
        norm = norm if norm is not None else float(self.engine.get_global_grad_norm())
        applied = math.isfinite(norm) and self.engine.was_step_applied()
        outcome = step_outcome(sums, batches, applied, self.world)
        self.world.log.activity = ""
        return sums.result(batches, grad_norm=norm, **outcome)

    def _run_passes(self, batches: Sequence[Batch], scale: float, sums: StepAccumulator) -> float | None:
        """Make the passes of a step and the update; return the gradient's norm where DeepSpeed does not compute it."""
        norm = None
        for index, batch in enumerate(batches):
            # The watchdog must not take a step of many micro-batches for a stalled one.
            self.world.log.record_progress()
            is_last = index == len(batches) - 1
            # DeepSpeed counts passes to find the last; with a limit of tokens each step has another number of them.
            self.engine.set_gradient_accumulation_boundary(is_last)
            self.world.log.activity = describe_pass("forward", index, batches)
            total, metrics = self.engine(batch.to(self.world.device))
            self.world.log.activity = describe_pass("backward", index, batches)
            # A new tensor: DeepSpeed would divide the engine's own output by the accumulation steps.
            loss = scale_loss_or_nan(total, scale)
            self.engine.backward(loss, scale_wrt_gas=False)
            sums.add(total, metrics)
            # Before the last `engine.step`, the one that updates: the others only count micro-batches.
            if is_last:
                self.world.log.activity = OPTIMIZER_UPDATE
                if self._max_grad_norm:
                    norm = self._clip_grad_norm(self._max_grad_norm)
            self.engine.step()
        return norm

    def try_batch(self, batch: Batch) -> None:
        """Make the passes of a micro-batch on this rank alone, with the memory of a step. No weight changes.

        Collectives return at once, so a rank that runs out of memory keeps no other rank waiting. The loss is nan, so
        DeepSpeed skips the update and clears the gradients. After an error the engine cannot be used.
        """
        counters = self._counters()
        self.module.train()
        with self.world.without_collectives(), without_order_checks():
            if self._unsharded_optimizer is not None:
                allocate_state(self._unsharded_optimizer)
            batches = with_scores(self.module, [batch], self.world)
            batches = with_step_stats(self.module, self.train_module.loss_inputs, batches, self.world)
            self._run_passes(batches, math.nan, StepAccumulator())
            if self.is_sharded:
                # Gathered weights that stay in memory are not those of the other ranks.
                self.engine.empty_partition_cache()
        if self._unsharded_optimizer is not None:
            self._unsharded_optimizer.state.clear()
        self._restore_counters(counters)
        self.world.log.activity = ""

    def destroy(self) -> None:
        """Drop what keeps the model in memory, after which the engine cannot be used."""
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        self.engine.destroy()
        FWD_MODULE_STACK.clear()  # a global list, in which stage 3 leaves the module
        # A backward pass that failed stays in the queue of this thread, with its activations, until the next one begins.
        torch.zeros(1, requires_grad=True).sum().backward()

    def _counters(self) -> dict[str, Any]:
        counters = {name: getattr(self.engine, name) for name in COUNTERS}
        return {"counters": counters, "loss_scale": self._loss_scaler_state()}

    def state_metadata(self) -> dict[str, Any]:
        return {**super().state_metadata(), **self._counters()}

    def _restore_counters(self, saved: Mapping[str, Any]) -> None:
        for name, value in saved.get("counters", {}).items():
            setattr(self.engine, name, value)
        # A checkpoint of a run in another precision has no loss scale.
        for name in self._loss_scaler_state():
            if name in saved.get("loss_scale", {}):
                setattr(self.engine.optimizer.loss_scaler, name, saved["loss_scale"][name])

    def load(self, checkpoint: CheckpointReader) -> str:
        reset = super().load(checkpoint)
        self._restore_counters(checkpoint.metadata)
        # Not stored: it follows from the steps, and a resumed run may have other micro-batches and ranks.
        self.engine.global_samples = self.engine.global_steps * self.engine.train_batch_size()
        # After the state: the powers of beta follow from the step that was loaded.
        replay_bias_correction(getattr(self.engine.optimizer, "optimizer", None))
        return reset

    def _loss_scaler_state(self) -> dict[str, float]:
        """Return the state of fp16's dynamic loss scale; empty without fp16."""
        if not self.engine.fp16_enabled():
            return {}
        return {
            name: value
            for name, value in vars(self.engine.optimizer.loss_scaler).items()
            if type(value) in (int, float)
        }

    def _clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradient, already averaged over the ranks, and return its norm; drop it if that is not finite."""
        groups = self.engine.optimizer.param_groups
        trained = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, max_norm))
        if not math.isfinite(norm):
            for parameter in trained:
                # An optimizer leaves weights without a gradient as they are; zeros would decay them.
                parameter.grad = None
        return norm
