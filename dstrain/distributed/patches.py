"""Changes to torch.distributed and DeepSpeed, each with its reason and version check."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

from dstrain.distributed.collective_log import HISTORY_SIZE, CollectiveLog
from dstrain.patching import check_version, replaced

if TYPE_CHECKING:
    import torch


TESTED_TORCH = ("2.8", "2.16")
"""First version tested, and the first one not tested."""
LOGGED_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)
"""Collectives that DeepSpeed's engine and this package call; all take `group`."""


class CollectivePatches:
    """Wrappers around the functions of torch.distributed in which ranks wait for each other.

    torch's own flight recorder does not help here: it knows NCCL only, and is read after the process has ended.
    """

    def __init__(self, log: CollectiveLog, timeout: timedelta) -> None:
        self.log, self.timeout = log, timeout
        self.is_disabled = False
        """True while collectives return at once and exchange nothing."""
        self._undo = ExitStack()

    def apply(self) -> None:
        """Replace the functions. Call before DeepSpeed is initialized: it copies some of them then."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        check_version("torch", *TESTED_TORCH)
        for name in LOGGED_COLLECTIVES:
            if hasattr(dist, name):  # older versions of torch lack some
                function = self._unless_disabled(log_calls(name, getattr(dist, name), self.log))
                self._undo.enter_context(replaced(dist, name, function))
        # deepspeed/comm/torch.py calls this one by its inner module.
        self._undo.enter_context(replaced(c10d, "all_gather_into_tensor", dist.all_gather_into_tensor))
        new_group = self._with_timeout(log_calls("new_group", dist.new_group, self.log))
        self._undo.enter_context(replaced(dist, "new_group", new_group))
        self._undo.enter_context(replaced(c10d, "new_group", new_group))

    def undo(self) -> None:
        """Put the functions back that `apply` replaced."""
        self._undo.close()

    def _unless_disabled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return FinishedWork() if self.is_disabled else function(*args, **kwargs)

        return wrapper

    def _with_timeout(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return new_group with the run's timeout instead of torch's 30 minutes where none is given.

        DeepSpeed clones the world without a timeout (deepspeed/utils/groups.py, `_clone_world_group`), so that ZeRO
        would wait half an hour for a dead rank.
        """

        @wraps(function)
        def new_group(ranks: Any = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any) -> Any:
            return function(ranks, timeout or self.timeout, *args, **kwargs)

        return new_group


class FinishedWork:
    """What a collective that exchanged nothing returns in place of a `torch.distributed.Work`."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


@contextmanager
def without_order_checks() -> Iterator[None]:
    """Context without ZeRO-3's comparison of the order of modules with that of rank 0, which needs messages."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    with replaced(coordinator, "assert_ints_same_as_other_ranks", lambda ints: None):
        yield


def log_calls(name: str, function: Callable[..., Any], log: CollectiveLog) -> Callable[..., Any]:
    """Return the function, which records its entry and return in the log. It holds no reference to its arguments."""
    names = list(inspect.signature(function).parameters)
    # torch takes `group` by position too.
    position = names.index("group") if "group" in names else len(names)
    group_log, now = log.group_log, time.monotonic  # looked up once: this runs for every collective

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        group = kwargs["group"] if "group" in kwargs else args[position] if len(args) > position else None
        entry = group_log(group)
        entry.last_started = number = entry.last_started + 1
        entry.recent_names[number % HISTORY_SIZE] = name
        entry.last_activity = now()
        result = function(*args, **kwargs)  # where it raises or hangs, the entry stays without a return
        entry.last_returned = number
        entry.last_activity = now()
        return result

    return wrapper


TESTED_DEEPSPEED = ("0.19", "0.20")
"""First version tested, and the first one not tested."""
PAGE_BYTES = 4096
"""Alignment of direct I/O, in bytes."""
NORM_ROW, NORM_BLOCK = 2**10, 2**18
"""Values of a gradient of which one norm is computed, and that are copied at a time: 1 MiB in fp32."""
MUON_COMPILED = ("muon_update", "zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz")
"""Functions of DeepSpeed's Muon that are wrapped in torch.compile."""


def skip_shm_comm_build() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce for inference, at every first start on a CPU.

    It needs a compiler, a killed build locks all later ones out, and a killed run leaves 66 MiB per rank in /dev/shm.
    """
    import deepspeed

    check_version("deepspeed", *TESTED_DEEPSPEED)
    # deepspeed/comm/torch.py builds the op only where it is marked as compatible.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def ask_cuda_for_free_memory() -> None:
    """Let DeepSpeed's CUDA accelerator read the free memory of a GPU from CUDA itself.

    Where nvidia-ml-py is installed, DeepSpeed asks NVML about the device number in CUDA_VISIBLE_DEVICES
    (`_get_nvml_gpu_id` in accelerator/cuda_accelerator.py of 0.19.8), so that a UUID (GPU-..., MIG-...) and each error of
    NVML end the start of stages 1 and 2.
    """
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    check_version("deepspeed", *TESTED_DEEPSPEED)

    def available_memory(self: Any, device_index: int | None = None) -> int:
        try:
            return torch.cuda.mem_get_info(device_index)[0]
        except RuntimeError:  # some virtual GPUs do not tell
            return int(self.total_memory(device_index) - self.memory_allocated(device_index))

    CUDA_Accelerator.available_memory = available_memory


def reuse_hpz_group() -> None:
    """Let several models of a process share the group of `zero_hpz_partition_size`.

    DeepSpeed creates it with each model that is built in shards, and fails at the second one: a reference or reward
    model next to the policy (0.19.8, `_create_zero_param_parallel_group` in deepspeed/utils/groups.py).
    """
    from deepspeed import comm
    from deepspeed.utils import groups

    check_version("deepspeed", *TESTED_DEEPSPEED)
    create = groups._create_zero_param_parallel_group
    if hasattr(create, "original"):
        return

    def create_once(group_size: int) -> None:
        group = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
        if group is not None and comm.get_world_size(group=group) == min(group_size, comm.get_world_size()):
            return
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        create(group_size)

    create_once.original = create  # type: ignore[attr-defined]
    groups._create_zero_param_parallel_group = create_once


def keep_unaligned_gradients(swapper: Any) -> None:
    """Patch an NVMe optimizer swapper: gradients that are not page-aligned in their group's buffer stay in memory.

    DeepSpeed writes each gradient above 1 MiB to a file and reads it back to its position among the others. Direct I/O
    works on whole pages: at any other position the values arrive up to a page too early, without an error, and another
    weight is updated with them (seen with 0.19.8, `_swap_in_pinned_gradients` in
    deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py).
    """
    swap_out = swapper.swap_out_gradients

    def swap_out_aligned(
        parameter: Any, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]
    ) -> None:
        swap_info = swapper.swap_params_info.get(swapper.parameter_id(parameter))
        pairs = list(zip(gradient_offsets, gradient_tensors, strict=True))
        for offset, tensor in pairs:
            if swap_info is not None and offset * tensor.element_size() % PAGE_BYTES:
                # Where DeepSpeed keeps gradients that are too small for a file; it reads them from memory.
                swap_info.unswapped_gradients[offset] = tensor
        aligned = [(offset, tensor) for offset, tensor in pairs if not offset * tensor.element_size() % PAGE_BYTES]
        if aligned:
            swap_out(parameter, [offset for offset, _ in aligned], [tensor for _, tensor in aligned])

    swapper.swap_out_gradients = swap_out_aligned


def use_foreach_norms(optimizer: Any) -> None:
    """Patch a ZeRO optimizer: the norm of a list of gradients is that of their norms, which are computed together.

    DeepSpeed copies each gradient to fp64 for its norm (`get_grad_norm_direct`): on a GPU two kernels for each tensor,
    and on a CPU most of the time goes into pages for the copy.
    """
    # The optimizer of stage 1 in bf16 has another norm: read_norm_once.
    compute_norm = getattr(optimizer, "get_grad_norm_direct", None)
    if compute_norm is None:
        return

    def norm_of_norms(
        gradients: Sequence[torch.Tensor], params: Sequence[torch.Tensor], norm_type: float = 2
    ) -> torch.Tensor:
        # DeepSpeed leaves out gradients with this mark.
        counted = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        norm: torch.Tensor = compute_norm(
            [compute_norms(counted)] if counted and norm_type == 2 else gradients, params, norm_type
        )
        return norm

    optimizer.get_grad_norm_direct = norm_of_norms


def compute_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return L2 norms of gradients on one device, or of their parts, which together have the norm of the gradients.

    On a CPU in fp64, of rows. Elsewhere in fp32, one of each gradient, where a kernel takes hundreds of gradients.
    """
    import torch

    if gradients[0].device.type == "cpu":
        return torch.cat([block_norms(gradient) for gradient in gradients])
    return torch.stack(torch._foreach_norm([gradient.detach() for gradient in gradients], 2, dtype=torch.float32))


def block_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the L2 norms of rows of a gradient's values, in fp64; together they have the norm of the gradient.

    A row is short enough to be summed in fp32: 7e-8 off in bf16, where torch's norm of 8 million values is 2e-4 off.
    """
    import torch

    values = gradient.detach().flatten()
    rows = values[: values.numel() // NORM_ROW * NORM_ROW].view(-1, NORM_ROW)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    found = [torch.linalg.vector_norm(block.to(wide), dim=1) for block in rows.split(NORM_BLOCK // NORM_ROW)]
    found.append(values[rows.numel() :].to(wide).norm().view(1))
    return torch.cat(found).double()


def find_overflow_by_norm(optimizer: Any) -> None:
    """Patch an optimizer of stages 1 and 2: it finds inf and nan by the norm of the gradients alone.

    DeepSpeed reads each gradient twice for its check, reduces the answer over the ranks and waits for the device; then
    it computes the norm and checks that in the same way, with the same consequence (`step` in
    deepspeed/runtime/zero/stage_1_and_2.py). Other optimizers are left alone, and those that offload: their check reads
    a value that the backward pass has noted.
    """
    if not getattr(optimizer, "compute_grad_norm", False) or not hasattr(optimizer, "check_grad_overflow"):
        return
    if optimizer.check_grad_overflow and not optimizer.cpu_offload:
        check_version("deepspeed", *TESTED_DEEPSPEED)
        optimizer.has_overflow = lambda *_args, **_kwargs: False


def drop_gradients_after_overflow(optimizer: Any) -> None:
    """Patch an optimizer of stages 1 and 2 that offloads: a step that was skipped leaves no gradient behind.

    DeepSpeed keeps the sums of the gradients in fp32 on the device. After an overflow it drops them without offloading
    only (`step` in deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8), so that nan stays in the sum and every later step
    is skipped too.
    """
    if not getattr(optimizer, "cpu_offload", False) or not hasattr(optimizer, "averaged_gradients"):
        return
    check_version("deepspeed", *TESTED_DEEPSPEED)
    reset = optimizer.reset_cpu_buffers

    def reset_all() -> None:  # also called after an update, which has dropped them
        reset()
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None

    optimizer.reset_cpu_buffers = reset_all


def read_norm_once() -> None:
    """Let DeepSpeed's optimizers copy the norm of the gradients to the host once in a step.

    DeepSpeed copies a -1 to the device for each group of parameters, from memory that is not pinned, and reads the
    norm again for each decision: is it finite, is the gradient clipped. Each makes the host wait for the device. Here
    the norms of the groups stay on the device until they are combined, and the host decides with one copy of the
    result. The values are the same to the bit. Call it before `deepspeed.initialize`.
    """
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    check_version("deepspeed", *TESTED_DEEPSPEED)
    if utils.mask_nan_or_inf_with_val_inplace is _mask_non_finite:
        return
    for module in (utils, stage_1_and_2, stage3):
        module.mask_nan_or_inf_with_val_inplace = _mask_non_finite
    for module in (stage_1_and_2, stage3):
        module.combine_grad_norm_groups = _on_host(utils.combine_grad_norm_groups)
    bf16_optimizer.get_global_norm_of_tensors = _on_host(_take_norms(utils.get_global_norm_of_tensors))
    bf16_optimizer.clip_tensors_by_global_norm = _clip_foreach
    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    optimizer.get_grad_norm_direct = _fill_constants(optimizer.get_grad_norm_direct)


def _mask_non_finite(input: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    """Write -1 where the values are not finite, without a copy to the device."""
    input.masked_fill_(~input.isfinite(), val)


def _on_host(compute_norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function with its result copied to the host, which waits for the device."""

    @wraps(compute_norm)
    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        return compute_norm(*args, **kwargs).cpu()

    return compute


def _take_norms(compute_norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return DeepSpeed's `get_global_norm_of_tensors`, called with one tensor: the norms of the tensors."""

    @wraps(compute_norm)
    def compute(input_tensors: Sequence[torch.Tensor], **kwargs: Any) -> torch.Tensor:
        return compute_norm([compute_norms(input_tensors)], **kwargs)

    return compute


def _fill_constants(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function, in which `torch.tensor` of a number is filled on its device instead of copied to it."""
    import torch
    from torch.overrides import TorchFunctionMode

    class FillConstants(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.tensor:
                return torch.full((), *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        with FillConstants():
            return function(*args, **kwargs)

    return call


def _offloads(optimizer: Any) -> bool:
    """Return whether a ZeRO optimizer keeps weights or states outside the device."""
    return any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer", "offload_param"))


def queue_waits_for_persistent_weights(optimizer: Any) -> None:
    """Patch a stage-3 optimizer: after an update the host does not wait for the weights that stay whole.

    DeepSpeed gathers them and then waits for the whole device, though the handle of each gather already makes the next
    kernels wait for it (`_post_step` in stage3.py, `_allgather_params_coalesced` in partition_parameters.py of
    deepspeed/runtime/zero). Optimizers that offload are left alone.
    """
    finish = getattr(optimizer, "_post_step", None)
    if _offloads(optimizer) or finish is None:
        return
    from deepspeed.accelerator import get_accelerator

    check_version("deepspeed", *TESTED_DEEPSPEED)

    def finish_queued(*args: Any, **kwargs: Any) -> None:
        with replaced(get_accelerator(), "synchronize", lambda *_: None):
            finish(*args, **kwargs)

    optimizer._post_step = finish_queued


def queue_waits_for_reduction(optimizer: Any) -> None:
    """Patch a ZeRO optimizer on a GPU: the next kernels wait for the reduction of gradients instead of the host.

    After each backward pass DeepSpeed's host waits, at stage 3 for the stream of the reduction, at stages 1 and 2 with
    `overlap_comm` for the whole device (`independent_gradient_partition_epilogue`), and the GPU has nothing to do until
    the next kernels are launched. Optimizers that offload are left alone: their host reads the gradients.
    """
    stream = getattr(optimizer, "reduction_stream", getattr(optimizer, "reduce_and_partition_stream", None))
    if _offloads(optimizer) or stream is None:
        return
    import torch
    from deepspeed.accelerator import get_accelerator

    check_version("deepspeed", *TESTED_DEEPSPEED)

    class QueuedStream(torch.cuda.Stream):
        def synchronize(self) -> None:
            torch.cuda.current_stream(self.device).wait_stream(self)

    place = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    queued = QueuedStream(**place)
    if hasattr(optimizer, "reduce_and_partition_stream"):
        optimizer.reduce_and_partition_stream = queued
        return
    finish = optimizer.independent_gradient_partition_epilogue

    def finish_queued() -> None:
        with replaced(get_accelerator(), "synchronize", queued.synchronize):
            finish()

    optimizer.independent_gradient_partition_epilogue = finish_queued


def skip_waits_for_local_weights() -> None:
    """Let stage 3's host not wait for weights that one process holds whole, on the device.

    DeepSpeed waits for the stream of its gathers before each layer (`NoGatherHandle` and `NoGatherCoalescedHandle` in
    deepspeed/runtime/zero/partition_parameters.py), though the kernels of the layer wait for that stream themselves
    (`fetch_sub_module` in partitioned_param_coordinator.py). Weights that come from the host are waited for as before.
    """
    from deepspeed.runtime.zero import partition_parameters

    check_version("deepspeed", *TESTED_DEEPSPEED)
    for handle, attribute in (
        (partition_parameters.NoGatherHandle, "_NoGatherHandle__param"),
        (partition_parameters.NoGatherCoalescedHandle, "_NoGatherCoalescedHandle__params"),
    ):
        handle.wait = _wait_for_the_host_only(handle.wait, attribute)


def _wait_for_the_host_only(wait: Callable[..., None], attribute: str) -> Callable[..., None]:
    from deepspeed.accelerator import get_accelerator

    wait_always = inspect.unwrap(wait)

    @wraps(wait_always)
    def wait_if_offloaded(handle: Any, **kwargs: Any) -> None:
        accelerator, parameters = get_accelerator(), getattr(handle, attribute)
        if not isinstance(parameters, list):
            parameters = [parameters]
        if not all(accelerator.on_accelerator(parameter.ds_tensor) for parameter in parameters):
            return wait_always(handle, **kwargs)
        with replaced(accelerator, "resolves_data_dependency", lambda: True):
            return wait_always(handle, **kwargs)

    return wait_if_offloaded


def use_foreach_step(optimizer: Any) -> None:
    """Patch DeepSpeed's optimizer of stage 0 in bf16: kernels of its step take many tensors each.

    DeepSpeed takes `FP16_UnfusedOptimizer` for any optimizer but its own FusedAdam: for each weight a check of its
    gradient, which the host waits for, a norm, two casts and a product. Here the norm decides alone, as at other stages.
    Other optimizers are left alone.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return
    import torch

    check_version("deepspeed", *TESTED_DEEPSPEED)
    weights = [weight for group in optimizer.fp16_groups for weight in group]
    masters = [master for group in optimizer.fp32_groups for master in group]

    @torch.no_grad()
    def step(closure: None = None) -> None:
        trained = [(weight, master) for weight, master in zip(weights, masters, strict=True) if weight.grad is not None]
        gradients = [weight.grad for weight, _ in trained]
        norm = float(compute_norms(gradients).norm()) if gradients else 0.0
        if not math.isfinite(norm):
            optimizer._skip_invalid_grad_norm()
            return
        optimizer.overflow, optimizer._global_grad_norm = False, norm
        for weight, master in zip(weights, masters, strict=True):
            # A weight without a gradient decays.
            master.grad = torch.zeros_like(master) if weight.grad is None else torch.empty_like(master)
        torch._foreach_copy_([master.grad for _, master in trained], gradients)
        excess = (norm + 1e-6) / optimizer.clip_grad if optimizer.clip_grad else 0.0
        if excess > 1:
            torch._foreach_mul_([master.grad for _, master in trained], 1 / excess)
        optimizer.optimizer.step()
        for master in masters:
            master.grad = None
        torch._foreach_copy_(weights, masters)

    optimizer.step = step


def accumulate_without_casts(optimizer: Any) -> None:
    """Patch an optimizer that sums 16-bit gradients in fp32: a kernel adds a gradient as it is, or clips many.

    DeepSpeed makes an fp32 copy of each gradient and adds that (`_update_hp_grad` in deepspeed/runtime/bf16_optimizer.py,
    `_add_to_grad_partition_buffer` in zero/stage_1_and_2.py). The sums are the same to the bit.
    """
    if hasattr(optimizer, "_add_to_grad_partition_buffer"):  # of stages 1 and 2
        check_version("deepspeed", *TESTED_DEEPSPEED)
        optimizer._add_to_grad_partition_buffer = _add_to_partition
    if not hasattr(optimizer, "_update_hp_grad"):
        return
    import torch

    check_version("deepspeed", *TESTED_DEEPSPEED)

    @torch.no_grad()
    def update(weight: torch.Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
        if weight.grad is None:
            return
        weight._hp_grad = optimizer.fp32_groups_gradients[group][index]
        weight._hp_grad.add_(weight.grad.view_as(weight._hp_grad))
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            weight.grad.zero_()

    optimizer._update_hp_grad = update


def _add_to_partition(output: torch.Tensor | None, source: torch.Tensor) -> None:
    """Add a gradient to its part of a sum; `output` is None where another process holds that part."""
    if output is not None:
        output.add_(source)


def _clip_foreach(
    input_tensors: Sequence[torch.Tensor], max_norm: float, global_norm: float, mpu: Any = None, eps: float = 1e-6
) -> float:
    """Multiply the tensors in place so that their norm, which is `global_norm`, is at most `max_norm`; return it."""
    import torch

    factor = max_norm / (float(global_norm) + eps)
    if factor < 1:
        torch._foreach_mul_(list(input_tensors), factor)
    return global_norm


def use_foreach_reduction(engine: Any, world_size: int) -> None:
    """Patch a DeepSpeed engine: it copies the sums of gradients over the ranks back together; one process has none.

    DeepSpeed concatenates the gradients, sums over one process too, and launches a copy for each of them
    (`allreduce_and_copy` in deepspeed/runtime/engine.py). Stages 1 to 3 reduce in another way, and of them only stage 1
    in bf16 with sums in fp32 comes here.
    """
    import torch
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    check_version("deepspeed", *TESTED_DEEPSPEED)
    if engine.zero_optimization_stage() and not isinstance(engine.optimizer, BF16_Optimizer):
        return
    if world_size == 1:
        engine.enable_backward_allreduce = False

    def allreduce_and_copy(gradients: Sequence[torch.Tensor], dp_group: Any, dp_world_size: int | None = None) -> None:
        reduced = engine.allreduce_bucket(gradients, dp_group, dp_world_size)
        torch._foreach_copy_(gradients, engine.unflatten(reduced, gradients))

    engine.allreduce_and_copy = allreduce_and_copy


def flatten_gradients_in_fp32(optimizer: Any) -> None:
    """Patch a ZeRO optimizer: it copies 16-bit gradients into a flat fp32 tensor at once.

    DeepSpeed concatenates them in 16 bits and converts the result (`step` in deepspeed/runtime/zero/stage_1_and_2.py,
    `_prepare_fp32_grad_for_sub_group` in stage3.py): 2 bytes more for each parameter of the partition, at stage 3 of
    the sub-group, and a pass more. The values are the same to the bit.
    """
    # One flat partition for each group or sub-group. The optimizer of stage 1 in bf16 has others.
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    attribute = next((name for name in names if hasattr(optimizer, name)), None)
    if attribute is None or not hasattr(optimizer, "averaged_gradients"):
        return
    check_version("deepspeed", *TESTED_DEEPSPEED)

    def patched(flatten: Callable[..., Any]) -> Callable[..., Any]:
        def flatten_in_fp32(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            for group, gradients in optimizer.averaged_gradients.items():
                if gradients is tensors:
                    return _copy_flat(tensors, getattr(optimizer, attribute)[group])
            return flatten(tensors, *args, **kwargs)

        return flatten_in_fp32

    optimizer.flatten = patched(optimizer.flatten)
    if hasattr(optimizer, "flatten_dense_tensors_aligned"):  # of the last rank at stages 1 and 2
        optimizer.flatten_dense_tensors_aligned = patched(optimizer.flatten_dense_tensors_aligned)


def _copy_flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the values of the tensors in a flat one of the size and type of `like`, with zeros at the end."""
    import torch

    flat = torch.empty_like(like, requires_grad=False)
    sizes = [tensor.numel() for tensor in tensors]
    *parts, rest = flat.split([*sizes, flat.numel() - sum(sizes)])
    torch._foreach_copy_([part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)], list(tensors))
    rest.zero_()
    return flat


def save_inputs_of_trained_weights() -> None:
    """Let ZeRO-3's linear layers keep their inputs for the backward pass only where the weight is trained.

    DeepSpeed replaces torch.nn.functional.linear by a function that keeps input, weight and bias
    (runtime/zero/linear.py); torch's own keeps the input for the gradient of the weight only. Without the patch adapters
    with dropout or on some layers, and frozen models with a trained projector, keep the inputs of all frozen layers.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    check_version("deepspeed", *TESTED_DEEPSPEED)
    setup_context = inspect.unwrap(LinearFunctionForZeroStage3.setup_context)

    @wraps(setup_context)
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, weight, *rest = inputs
        setup_context(ctx, (input if weight.requires_grad else None, weight, *rest), output)

    LinearFunctionForZeroStage3.setup_context = staticmethod(setup)


def disable_muon_compile() -> Any:
    """Replace the compiled functions of DeepSpeed's Muon by the plain ones; return the module with the optimizer.

    The rounding of a compiled function depends on the shapes it was traced with, so a resumed run, whose first
    shape differs, would give other values. Compiling also needs a compiler on every host.

    Call it before `deepspeed.initialize` with ZeRO, for any optimizer: DeepSpeed imports Muon there, and its decorators
    load torch's compiler, which takes 1.2 s of a processor. Here the module is imported without them.
    """
    from deepspeed.runtime import compiler

    check_version("deepspeed", *TESTED_DEEPSPEED)
    with replaced(compiler, "compile", _keep_function):
        from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
    # Of a module that was imported before.
    for module in (original_muon, muon_optimizer):  # the second imports functions of the first by name
        for name in MUON_COMPILED:
            if hasattr(module, name):
                setattr(module, name, inspect.unwrap(getattr(module, name)))
    return muon_optimizer


def _keep_function(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that changes nothing."""
    return lambda function: function


def replay_bias_correction(adam: Any) -> None:
    """Bring the beta^t of a DeepSpeedCPUAdam to the step that was loaded, by the products of an unbroken run.

    Other optimizers are left alone. The powers are a running product in fp32 outside the optimizer's state. On a jump
    of the step CPUAdam calls pow instead, and a resumed run would differ in the last bit (`IncrementStep` in
    deepspeed/ops/csrc/includes/cpu_adam.h).
    """
    import torch

    if not hasattr(adam, "ds_opt_adam"):
        return
    num_steps = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    betas, eps = adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]
    dummies = [torch.zeros(1) for _ in range(4)]  # parameter, gradient and two averages
    for step in range(1, num_steps + 1):
        # Each call multiplies the powers once more; lr and weight decay are 0, and the tensors are not the
        # model's.
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *betas, eps, 0.0, True, *dummies)


def unite_partial_offload(zero_optimizer: Any) -> None:
    """Let both optimizers of a partial offload (`offload_optimizer.ratio` below 1) have one state and one set of groups.

    DeepSpeed (runtime/zero/stage3.py of 0.19, `backup_optimizer`) updates the subgroups that stay on the GPU with an
    optimizer of its own: it keeps the learning rate of the construction, and its moments are in no checkpoint.
    """
    backup = getattr(zero_optimizer, "backup_optimizer", None)
    if backup is None:
        return
    own = zero_optimizer.optimizer
    for group in own.param_groups:
        for name, value in backup.defaults.items():
            group.setdefault(name, value)
    backup.param_groups, backup.state = own.param_groups, own.state


class Zero3Subgroups:
    """Subgroups of DeepSpeed's stage-3 optimizer, each in memory or on a disk.

    DeepSpeed has no public way to read its NVMe state in parts: its own checkpoints need all of it in memory.
    """

    PRIVATE = (
        "_swappable_optimizer_subgroup",
        "_optimizer_states_and_gradient_swap_in",
        "_optimizer_states_and_gradient_swap_out",
        "_reassign_or_swap_out_partitioned_parameters",
        "_release_swap_buffers",
    )

    def __init__(self, zero_optimizer: Any) -> None:
        """Raises RuntimeError if this version of DeepSpeed lacks one of the private methods."""
        self._zero = zero_optimizer
        # Now, and not at the first save: private methods may go with any version.
        if missing := [name for name in self.PRIVATE if not hasattr(zero_optimizer, name)]:
            raise RuntimeError(
                f"DeepSpeed's stage-3 optimizer has no {missing[0]}; install deepspeed>={TESTED_DEEPSPEED[0]},"
                f"<{TESTED_DEEPSPEED[1]}"
            )

    def __len__(self) -> int:
        return len(self._zero.fp16_groups)

    def optimizer(self, index: int) -> Any:
        """Return the optimizer that updates a subgroup."""
        stays = getattr(self._zero, "backup_optimizer", None) and self._zero.subgroup_to_device[index] != "cpu"
        return self._zero.backup_optimizer if stays else self._zero.optimizer

    def is_on_nvme(self, index: int) -> bool:
        return bool(self._zero._swappable_optimizer_subgroup(index))

    def swap_in(self, index: int) -> None:
        """Read a subgroup's state from the disk into buffers."""
        self._zero._optimizer_states_and_gradient_swap_in(index)

    def swap_out(self, index: int) -> None:
        """Write a subgroup's state to the disk and free its buffers."""
        self._zero._optimizer_states_and_gradient_swap_out(index)

    def release(self, index: int) -> None:
        """Free a subgroup's buffers without writing them."""
        self._zero._release_swap_buffers(index)

    def update_weights(self, index: int) -> None:
        """Copy a subgroup's master weights into the model's, in memory or on the disk."""
        self._zero._reassign_or_swap_out_partitioned_parameters(index)
