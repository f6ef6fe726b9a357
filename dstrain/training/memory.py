"""Memory while training: measured, predicted, exceeded."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import socket
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from dstrain.config import BatchPlan, RunConfig
from dstrain.distributed.world import World
from dstrain.errors import OutOfMemoryError
from dstrain.host_limits import get_available_memory
from dstrain.planner.choose import Fix, list_fixes, suggest_fixes
from dstrain.planner.lines import PlanInputs
from dstrain.planner.memory import plan_memory
from dstrain.planner.shapes import ListBase, read_shape
from dstrain.planner.workload import Cluster
from dstrain.preset import Preset
from dstrain.report.allocation_errors import AllocationFailure, find_allocation_failure
from dstrain.report.memory import PeakBytes, bytes_outside_torch, measure_peak
from dstrain.report.observe import observing
from dstrain.report.run_log import RunLog
from dstrain.training.health.watchdog import RESTART_HINT, open_stacks_file
from dstrain.training.list_parameters import list_base_parameters
from dstrain.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Predicted memory of one rank. On a CPU the device is the process's own host memory."""

    device_bytes: int
    """All of the GPU, with what is outside of torch's allocator."""
    tensor_bytes: int
    """Tensors alone."""
    lines: tuple[tuple[str, str, int], ...]
    """(name, place, bytes) of each part; the place is gpu, host or nvme."""
    fixes: tuple[Fix, ...]
    """Changes of the recipe that save device memory, the cheapest in speed first."""
    inputs: PlanInputs | None = None
    """What the plan was computed from."""


def make_forecast(
    config: RunConfig, preset: Preset, cluster: Cluster, list_base: ListBase | None = None
) -> MemoryForecast | None:
    """Return the planner's forecast; None where it cannot read the shape of the model. `list_base`: as in `read_shape`."""
    try:
        shape = read_shape(config, list_base)
        plan = plan_memory(config, preset, cluster, shape)
        fixes = suggest_fixes(config, preset, cluster, shape, list_base=list_base)
    except Exception as error:  # a forecast that fails must not stop a run
        log.info("no forecast of the memory: %s: %s", type(error).__name__, error)
        return None
    return MemoryForecast(
        device_bytes=plan.gpu_bytes,
        tensor_bytes=plan.tensor_bytes,
        lines=tuple((line.name, line.place, line.num_bytes) for line in plan.lines),
        fixes=tuple(fixes),
        inputs=plan.run,
    )


def describe_measured(measured: PeakBytes) -> str:
    """Return the line for a CPU.

    There a prediction would mostly be a reserve for libraries, and buffers whose pages a small model never touches.
    """
    return f"memory: measured {_format_measured(measured.total)}"


def describe_forecast(forecast: MemoryForecast | None, measured: PeakBytes) -> str:
    """Return `memory: tensors predicted 11.2 GiB, measured 10.8 GiB; GPU predicted 12.4 GiB, measured 12.0 GiB`."""
    tensors, total = f"measured {_format_measured(measured.tensors)}", f"measured {_format_measured(measured.total)}"
    if forecast is not None:
        tensors = f"predicted {format_bytes(forecast.tensor_bytes)}, {tensors}"
        total = f"predicted {format_bytes(forecast.device_bytes)}, {total}"
    return f"memory: tensors {tensors}; GPU {total}"


def _format_measured(peak: int | None) -> str:
    return "unknown" if peak is None else format_bytes(peak)


def find_most(peaks: Sequence[PeakBytes]) -> PeakBytes:
    """Return the most tensors and the most memory of any rank."""
    tensors = [peak.tensors for peak in peaks if peak.tensors is not None]
    totals = [peak.total for peak in peaks if peak.total is not None]
    return PeakBytes(max(tensors, default=None), max(totals, default=None))


COMPARED_STEP = 2
"""Step after which predicted and measured memory are compared: the first one allocates optimizer state."""


@dataclass(kw_only=True)
class MemoryMonitor:
    """Memory of a run on this rank."""

    config: RunConfig
    batch: BatchPlan
    preset: Preset
    cluster: Cluster
    world: World
    run_dir: Path
    _pending: Future[MemoryForecast | None] | None = field(default=None, init=False)
    """Rank 0's forecast, which a thread makes: the other ranks must not wait for it."""
    _measured: PeakBytes = field(default=PeakBytes(None, None), init=False)

    def make_forecast(self, list_base: ListBase | None = None) -> MemoryForecast | None:
        """Return the planner's forecast of this run. `list_base`: as in `read_shape`."""
        config = self.config.model_copy(update={"batch": self.batch.to_config(self.config.batch)})
        return make_forecast(config, self.preset, self.cluster, list_base)

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Context that replaces a failed allocation by an OutOfMemoryError with the message for the user."""
        try:
            yield
        except Exception as error:
            failure = None if isinstance(error, OutOfMemoryError) else find_allocation_failure(error)
            if failure is None:
                raise
            self._write_stack(error)
            if failure.place == "host":  # the frames hold what the pass has allocated, and the message needs memory too
                traceback.clear_frames(error.__traceback__)
                free_cached_memory()
            try:
                found = self._to_error(failure)
            except (MemoryError, RuntimeError):
                what = f"rank {self.world.rank}, {self._where()}: could not allocate {failure.describe()}"
                found = OutOfMemoryError(f"out of memory: {what}, nor the memory for a longer message")
            raise found from None

    def compare_with_forecast(self, steps_of_this_start: int, run_log: RunLog) -> None:
        """Report the measured memory of the rank with most after the second step of a start. Collective at that step.

        On GPUs rank 0 reports it beside the planner's forecast, as soon as that is made.
        """
        if steps_of_this_start == COMPARED_STEP:
            self._measured = find_most(self.world.gather(measure_peak(self.world.device)))
            if self.world.device.type == "cpu":
                run_log.announce(describe_measured(self._measured), "memory", measured_bytes=self._measured.total)
            elif self.world.rank == 0:
                thread = ThreadPoolExecutor(1, thread_name_prefix="dstrain-forecast")
                self._pending = thread.submit(self.make_forecast)
                thread.shutdown(wait=False)
        if self._pending is not None and self._pending.done():
            self.finish_comparison(run_log)

    def finish_comparison(self, run_log: RunLog) -> None:
        """Report the forecast beside the measured memory; wait for it where it is still being made."""
        if self._pending is None:
            return
        forecast, measured = self._pending.result(), self._measured
        self._pending = None
        fields = {"measured_bytes": measured.tensors, "measured_total_bytes": measured.total}
        if forecast is not None:
            fields |= {"predicted_bytes": forecast.tensor_bytes, "predicted_total_bytes": forecast.device_bytes}
            fields["predicted_host_bytes"] = sum(size for _, place, size in forecast.lines if place == "host")
        run_log.announce(describe_forecast(forecast, measured), "memory", **fields)

    def _where(self) -> str:
        log = self.world.log
        return ", ".join(filter(None, [log.phase, log.activity])) or "starting"

    def _to_error(self, failure: AllocationFailure) -> OutOfMemoryError:
        log, is_cuda = self.world.log, self.world.device.type == "cuda"
        is_on_device = is_cuda == (failure.place == "gpu")
        text = f"{self._where()}: could not allocate {failure.describe()}"
        with contextlib.suppress(OSError):
            journal = RunLog(self.run_dir, rank=0, repairs=False)  # of rank 0 too, if this is another rank
            journal.log_event(
                "out_of_memory", step=log.step, rank=self.world.rank, what=text, requested_bytes=failure.requested_bytes
            )
            journal.close()
        missing = find_missing_bytes(failure, self.world.device)
        return self._compose(text, is_on_device, failure.text, missing)

    def _compose(self, where: str, is_on_device: bool, reason: str, missing: int | None) -> OutOfMemoryError:
        """Return the error: a title, lines about memory, numbered fixes, and what to do then."""
        device = self.world.device
        place = f" ({device})" if device.type == "cuda" else ""
        title = f"out of memory: rank {self.world.rank} on {socket.gethostname()}{place}, {where}"
        memory = [reason] if reason else []
        if is_on_device:
            forecast = self.make_forecast(list_base_parameters)
            memory += [] if forecast is None else _iter_predicted(forecast)
            memory += _iter_gpu_counters(device) if device.type == "cuda" else _iter_host_counters()
            changes = [] if forecast is None else order_fixes(forecast.fixes, missing)
            changes = changes or list_fixes(self.config, self.preset, self.batch, self.world.size)
            fixes = [fix.describe() for fix in changes]
            if self.config.batch.on_oom == "stop" and self.batch.half(self.world.size) is not None:
                fixes.append(
                    "batch.on_oom stop -> shrink finds the largest micro-batch that fits before the first step"
                )
        else:
            memory += _iter_host_counters()
            fixes = list_host_fixes(self.config, self.preset, device.type == "cpu")
        numbered = [f"  {number}. {fix}" for number, fix in enumerate(fixes, 1)]
        what_to_do = ["to fit, set in this order:", *numbered] if numbered else []
        return OutOfMemoryError("\n".join([title, *(f"  {line}" for line in memory), *what_to_do, RESTART_HINT]))

    def _write_stack(self, error: Exception) -> None:
        """Append the traceback to the file of this rank's stacks: the message has no room for it."""
        with contextlib.suppress(OSError, MemoryError):
            if (file := open_stacks_file(self.run_dir, self.world.rank)) is not None:
                traceback.print_exception(error, file=file)
                file.close()


LEAST_SHARE = 0.25
"""Share of the missing bytes that a fix saves at least, to be named."""


def find_missing_bytes(failure: AllocationFailure, device: torch.device) -> int | None:
    """Return the bytes of the failed allocation that a GPU has not free; None where they are not known."""
    if failure.requested_bytes is None or failure.place != "gpu" or device.type != "cuda":
        return None
    with observing("torch.cuda.mem_get_info"):
        return max(failure.requested_bytes - torch.cuda.mem_get_info(device)[0], 0)
    return None


def order_fixes(fixes: Sequence[Fix], missing: int | None) -> list[Fix]:
    """Return the fixes that save the missing bytes, in their order, then others by what they save.

    Those that save far less are left out, but where there are only such. `missing`: None where it is not known.
    """
    if not missing:
        return [*fixes]
    by_size = sorted(fixes, key=lambda fix: fix.saved_bytes or 0, reverse=True)
    enough = [fix for fix in fixes if (fix.saved_bytes or 0) >= missing]
    helpful = [fix for fix in by_size if LEAST_SHARE * missing <= (fix.saved_bytes or 0) < missing]
    return enough + helpful or by_size


BYTES_OF_TRAINING = 16
"""Bytes per trained parameter with Adam in mixed precision: weight and gradient 2 each, fp32 master weight and two
moments 4 each (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1)."""


def list_host_fixes(config: RunConfig, preset: Preset, is_on_cpu: bool) -> list[str]:
    """Return the fixes for full host memory."""
    data = config.data
    found = [
        f"data.workers: below {data.workers}, and data.prefetch: below {data.prefetch}: saves batches that wait in memory"
    ]
    if preset.offload_optimizer == "cpu" or preset.offload_param == "cpu":
        found.append(
            f"ds_config: one without offloading to the host (now {preset.name}), or zero3_nvme: "
            f"saves up to {BYTES_OF_TRAINING - 4} bytes per trained parameter on the host"
        )
    if config.save.background:
        found.append("save.background: false: saves the copy of the state that is being written")
    if not is_on_cpu and data.pin:
        found.append("data.pin: false: saves page-locked copies of batches")
    return [*found, "fewer processes per host, or a host or a container limit with more memory"]


def free_cached_memory() -> None:
    """Return unused memory of torch's allocator to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _iter_predicted(forecast: MemoryForecast) -> Iterator[str]:
    lines = [(name, num_bytes) for name, place, num_bytes in forecast.lines if place == "gpu"]
    width = max((len(name) for name, _ in lines), default=0)
    yield f"{'planned'.ljust(width)}  {format_bytes(forecast.device_bytes)} in all"
    for name, num_bytes in lines:
        yield f"  {name.ljust(width)}  {format_bytes(num_bytes)}"


def _iter_gpu_counters(device: torch.device) -> Iterator[str]:
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    yield (
        f"measured: tensors {format_bytes(allocated)}, at most {format_bytes(torch.cuda.max_memory_allocated(device))}; "
        f"reserved by torch {format_bytes(reserved)}, of which {format_bytes(reserved - allocated)} in gaps"
    )
    with observing("torch.cuda.mem_get_info"):  # some virtual GPUs do not tell
        free, total = torch.cuda.mem_get_info(device)
        others = bytes_outside_torch(device)
        yield f"GPU: {format_bytes(total)}, free {format_bytes(free)}, used outside torch {format_bytes(others)}"


def _iter_host_counters() -> Iterator[str]:
    with observing("host memory"):
        info = psutil.Process().memory_info()
        yield f"measured: process {format_bytes(info.rss)} resident, {format_bytes(info.vms)} of addresses"
        host = psutil.virtual_memory()
        yield f"host: {format_bytes(host.total)}, available to this process {format_bytes(get_available_memory())}"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield f"limit of addresses of the process (ulimit -v): {format_bytes(limit)}"
