"""Patches of DeepSpeed. Each has a test that shows the fault without the patch: it fails once DeepSpeed is fixed."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dstrain.distributed import patches
from dstrain.distributed.collective_log import CollectiveLog
from dstrain.distributed.patches import (
    LOGGED_COLLECTIVES,
    MUON_COMPILED,
    NORM_BLOCK,
    PAGE_BYTES,
    CollectivePatches,
    Zero3Subgroups,
    ask_cuda_for_free_memory,
    disable_muon_compile,
    find_overflow_by_norm,
    flatten_gradients_in_fp32,
    keep_unaligned_gradients,
    queue_waits_for_persistent_weights,
    queue_waits_for_reduction,
    read_norm_once,
    replay_bias_correction,
    reuse_hpz_group,
    save_inputs_of_trained_weights,
    skip_shm_comm_build,
    use_foreach_norms,
)
from dstrain.distributed.world import TorchWorld

deepspeed = pytest.importorskip("deepspeed")
cuda_accelerator = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
CUDA_Accelerator = cuda_accelerator.CUDA_Accelerator


def test_deepspeed_would_build_shared_memory_collectives_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    comm, loads = importlib.import_module("deepspeed.comm.torch"), list[str]()
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None:
        pytest.skip("this accelerator has no such kernel")
    monkeypatch.setattr(type(builder), "load", lambda self, *_, **__: loads.append(self.NAME))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    comm.build_shm_op()
    assert loads == ["deepspeed_shm_comm"], "without the patch: remove skip_shm_comm_build if this fails"
    skip_shm_comm_build()
    comm.build_shm_op()
    assert loads == ["deepspeed_shm_comm"]


class PagedSwapper:
    """DeepSpeed's swapper of gradients over a disk that works on whole pages, as direct I/O does."""

    def __init__(self) -> None:
        from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper as module

        self._module, self.files = module, dict[int, torch.Tensor]()
        self.info = SimpleNamespace(unswapped_gradients=dict[int, torch.Tensor]())
        self.swap_params_info = {0: self.info}

    def parameter_id(self, parameter: Any) -> int:
        return 0

    def swap_out_gradients(self, parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> None:
        for offset, tensor in zip(gradient_offsets, gradient_tensors, strict=True):
            self.files[offset] = tensor.clone()

    def read(self, numel: int) -> torch.Tensor:
        """Each file to the page in which it begins, then what stayed in memory."""
        buffer = torch.zeros(numel)
        for offset, tensor in self.files.items():
            start = offset * 4 // PAGE_BYTES * PAGE_BYTES // 4
            buffer[start : start + tensor.numel()] = tensor
        for offset, tensor in self.info.unswapped_gradients.items():
            buffer[offset : offset + tensor.numel()] = tensor
        return buffer


@pytest.mark.parametrize("is_patched", [False, True])
def test_unaligned_gradients_come_back_to_their_place_with_the_patch_alone(is_patched: bool) -> None:
    swapper, gradients = PagedSwapper(), [torch.full((1500,), 1.0), torch.full((1000,), 2.0)]
    if is_patched:
        keep_unaligned_gradients(swapper)
    swapper.swap_out_gradients(None, [0, 1500], gradients)
    assert torch.equal(swapper.read(2500), torch.cat(gradients)) == is_patched
    assert (0 in swapper.files, 1500 in swapper.files) == (True, not is_patched)


def test_deepspeed_reads_a_gradient_to_its_offset_whatever_its_alignment() -> None:
    """The fault itself: the buffer of a read begins at the gradient's offset. Look again if this text is gone."""
    from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper as Swapper

    assert "narrow(0, grad.offset, grad.length)" in inspect.getsource(Swapper._swap_in_pinned_gradients)
    assert "align" not in inspect.getsource(Swapper._swap_in_pinned_gradients)
    assert {"parameter", "gradient_offsets", "gradient_tensors"} < {
        *inspect.signature(Swapper.swap_out_gradients).parameters
    }


def fresh_copy(module: ModuleType) -> Any:
    """The module as it is imported, before any patch."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_fresh", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_frozen_layer_of_stage_3_keeps_its_input_without_the_patch_alone(
    is_patched: bool, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, zero3_linear_wrap

    plain = inspect.unwrap(LinearFunctionForZeroStage3.setup_context)
    monkeypatch.setattr(LinearFunctionForZeroStage3, "setup_context", staticmethod(plain))
    for _ in range(2 * is_patched):
        save_inputs_of_trained_weights()
    given = torch.randn(2, 3, 4, requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=is_trained), torch.randn(5)
    leaves = [given, *[weight] * is_trained]
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = zero3_linear_wrap(given, weight, bias)
    assert (given.untyped_storage().data_ptr() in kept) == (is_trained or not is_patched)
    expected = torch.autograd.grad((given @ weight.T + bias).square().sum(), leaves)
    for one, other in zip(torch.autograd.grad(found.square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_deepspeed_compiles_muon_and_the_patch_takes_the_plain_functions() -> None:
    import torch._dynamo
    from deepspeed.runtime.zero.muon import original_muon

    # The variable TORCH_COMPILE_DISABLE of all tests; pytest's monkeypatch would remove the setting at its end.
    with torch._dynamo.config.patch(disable=False):
        fresh = fresh_copy(original_muon)
    compiled = [name for name in MUON_COMPILED if inspect.unwrap(getattr(fresh, name)) is not getattr(fresh, name)]
    assert compiled == [*MUON_COMPILED], "without the patch: remove disable_muon_compile if this fails"
    for module in (disable_muon_compile(), original_muon):
        for name in MUON_COMPILED:
            if hasattr(module, name):
                assert inspect.unwrap(getattr(module, name)) is getattr(module, name)


@pytest.mark.slow  # the plain functions: parity/test_optimizers [muon-*]
def test_importing_muon_does_not_load_torchs_compiler() -> None:
    """It takes as long as importing torch, and DeepSpeed imports Muon for every optimizer with ZeRO."""
    probe = "import sys; {}; print('torch._inductor.compile_fx' in sys.modules)"
    patched = "from dstrain.distributed.patches import disable_muon_compile; disable_muon_compile()"
    plain = "import deepspeed.runtime.zero.muon.muon_optimizer"

    def loads_compiler(code: str) -> bool:
        command = [sys.executable, "-c", probe.format(code)]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "0"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1] == "True"

    assert loads_compiler(plain), "without the patch: the import needs no patch if this fails"
    assert not loads_compiler(patched)


def cpu_adam(weight: torch.nn.Parameter) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([weight], lr=0.1, betas=(0.9, 0.999))


def take_steps(adam: Any, weight: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        weight.grad = torch.full_like(weight, 0.1 * step + 0.01)
        adam.step()


@pytest.mark.slow
@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_loaded_cpu_adam_goes_on_to_the_bit_with_the_patch_alone(
    is_replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Path.home() / ".cache/torch_extensions"
    if not [*built.glob("*/cpu_adam/*.so")]:
        pytest.skip("DeepSpeed's CPU Adam is not compiled here (python -m tests.kernels)")
    cpuinfo: Any = importlib.import_module("cpuinfo")
    monkeypatch.setattr(cpuinfo, "get_cpu_info", cache(cpuinfo.get_cpu_info))  # each Adam asks, by a process of its own
    steps, resumed_at, weights = 60, 37, []
    for is_resumed in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 4096))
        adam = cpu_adam(weight)
        take_steps(adam, weight, range(resumed_at))
        if is_resumed:
            state, again = adam.state_dict(), cpu_adam(weight)
            again.load_state_dict(state)
            adam = again
            if is_replayed:
                replay_bias_correction(adam)
        take_steps(adam, weight, range(resumed_at, steps))
        weights.append(weight.detach().clone())
    assert torch.equal(*weights) == is_replayed, "without the patch equal: remove replay_bias_correction"


def test_other_optimizers_are_not_replayed() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    adam = torch.optim.AdamW([weight])
    weight.grad = torch.ones(1)
    adam.step()
    before = copy.deepcopy(adam.state_dict())
    replay_bias_correction(adam)
    assert adam.state_dict() == before
    replay_bias_correction(None)  # a run without an optimizer


def test_stage_3_still_has_its_private_methods_and_no_public_ones_for_parts() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    assert [name for name in Zero3Subgroups.PRIVATE if not hasattr(Stage3, name)] == []
    public = {name.removeprefix("_") for name in Zero3Subgroups.PRIVATE}
    assert not [name for name in public if hasattr(Stage3, name)], "use these instead"


def test_a_stage_3_optimizer_of_another_deepspeed_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"has no _swappable_optimizer_subgroup; install deepspeed>=0\.19,<0\.20"):
        Zero3Subgroups(SimpleNamespace(fp16_groups=[]))


@pytest.mark.parametrize("norm_type", [2, float("inf")])
def test_the_norm_of_gradients_is_that_of_their_norms(norm_type: float) -> None:
    seen: list[torch.Tensor] = []

    def get_grad_norm_direct(gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        seen.extend(gradients)
        counted = [one for one in gradients if not getattr(one, "_zero_padding", False)]
        return torch.stack([torch.linalg.vector_norm(one.double(), norm_type) for one in counted]).norm(norm_type)

    optimizer = SimpleNamespace(get_grad_norm_direct=get_grad_norm_direct)
    gradients = [torch.randn(3, NORM_BLOCK), torch.randn(5).bfloat16(), torch.ones(7)]
    gradients[-1]._zero_padding = True  # type: ignore[attr-defined]
    wanted = get_grad_norm_direct(gradients, [], norm_type)
    seen.clear()
    use_foreach_norms(optimizer)
    torch.testing.assert_close(optimizer.get_grad_norm_direct(gradients, [], norm_type=norm_type), wanted)
    assert len(seen) == (1 if norm_type == 2 else 3)


def test_without_a_gradient_deepspeed_computes_the_norm() -> None:
    optimizer = SimpleNamespace(get_grad_norm_direct=lambda gradients, params, norm_type: len(gradients))
    use_foreach_norms(optimizer)
    assert optimizer.get_grad_norm_direct([], []) == 0


def test_an_infinite_gradient_has_an_infinite_norm_in_blocks() -> None:
    norm = lambda gradients, params, norm_type: torch.stack([one.norm() for one in gradients]).norm()  # noqa: E731
    optimizer = SimpleNamespace(get_grad_norm_direct=norm)
    use_foreach_norms(optimizer)
    assert not optimizer.get_grad_norm_direct([torch.tensor([1.0, torch.nan]), torch.ones(2)], []).isfinite()
    assert not optimizer.get_grad_norm_direct([torch.tensor([1.0, torch.inf]), torch.ones(2)], []).isfinite()


@pytest.mark.parametrize("stage", ["stage_1_and_2", "stage3"])
def test_deepspeed_computes_norms_where_the_patch_expects_it(stage: str) -> None:
    source = (Path(importlib.util.find_spec("deepspeed").origin).parent / f"runtime/zero/{stage}.py").read_text()  # type: ignore[union-attr,arg-type]
    assert "def get_grad_norm_direct(self, gradients, params, norm_type=2)" in source
    assert "self.get_grad_norm_direct(self.averaged_gradients[i], " in source


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_deepspeed_finds_overflow_by_the_norm_too(value: float) -> None:
    """Its own check of the norm, in stages 1 and 2; without it `find_overflow_by_norm` would let the gradient pass."""
    from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm

    source = (Path(importlib.util.find_spec("deepspeed").origin).parent / "runtime/zero/stage_1_and_2.py").read_text()  # type: ignore[union-attr,arg-type]
    assert "or self.check_grad_overflow) and is_invalid_grad_norm(scaled_global_grad_norm):" in source
    assert is_invalid_grad_norm(combine_grad_norm_groups([torch.tensor(1.0), torch.tensor(value)], norm_type=2))
    assert is_invalid_grad_norm(combine_grad_norm_groups([torch.tensor(1.0), torch.tensor(-1.0)], norm_type=2))


@pytest.mark.parametrize(
    ("attributes", "is_patched"),
    [
        ({"compute_grad_norm": True, "check_grad_overflow": True, "cpu_offload": False}, True),
        ({"compute_grad_norm": True, "check_grad_overflow": True, "cpu_offload": True}, False),
        ({"compute_grad_norm": False, "check_grad_overflow": True, "cpu_offload": False}, False),
        ({}, False),  # stage 3 and the optimizers without ZeRO
    ],
)
def test_overflow_is_found_by_the_norm_where_deepspeed_checks_it(attributes: dict[str, bool], is_patched: bool) -> None:
    optimizer = SimpleNamespace(has_overflow=lambda partition_gradients=True: True, **attributes)
    find_overflow_by_norm(optimizer)
    assert optimizer.has_overflow(partition_gradients=True) is not is_patched


@pytest.mark.parametrize("value", [0.5, 0.0, float("nan"), float("inf")])
def test_the_norm_is_read_once_and_is_that_of_deepspeed_to_the_bit(value: float) -> None:
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    read_norm_once()
    scalars = [torch.tensor(3.0), torch.tensor(value)]
    for module in (stage_1_and_2, stage3):
        torch.testing.assert_close(
            module.combine_grad_norm_groups(scalars), utils.combine_grad_norm_groups(scalars), rtol=0, atol=0
        )
    norm = torch.tensor(value)
    stage_1_and_2.mask_nan_or_inf_with_val_inplace(norm)
    assert norm == (value if math.isfinite(value) else -1.0)


def test_optimizers_that_offload_or_have_no_stream_wait_as_before() -> None:
    for attributes in (
        {"offload_optimizer": True, "reduce_and_partition_stream": object()},
        {"reduction_stream": None},
    ):
        optimizer = SimpleNamespace(**attributes)
        queue_waits_for_reduction(optimizer)
        assert vars(optimizer) == attributes


@pytest.mark.parametrize(("offload", "waits"), [(False, 0), (True, 1)])
def test_the_host_does_not_wait_for_persistent_weights(
    offload: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update of stage 3; DeepSpeed waits for the device there, in `_allgather_params_coalesced`."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init

    assert "get_accelerator().synchronize()" in inspect.getsource(Init._allgather_params_coalesced)
    calls: list[str] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda: calls.append("wait"), raising=False)

    def finish(timer_names: Any) -> None:
        calls.append("gather")
        get_accelerator().synchronize()

    optimizer = SimpleNamespace(_post_step=finish, offload_optimizer=offload)
    queue_waits_for_persistent_weights(optimizer)
    optimizer._post_step([])
    assert calls == ["gather", *["wait"] * waits]
    get_accelerator().synchronize()
    assert len(calls) == 2 + waits, "it waits again behind the step"


def test_gradients_are_copied_once_into_a_flat_fp32_partition() -> None:
    made: list[str] = []
    gradients = [torch.randn(3, 4).bfloat16(), torch.randn(5).bfloat16()]
    optimizer = SimpleNamespace(
        flatten=lambda tensors: made.append("plain"),
        flatten_dense_tensors_aligned=lambda tensors, alignment: made.append("aligned"),
        averaged_gradients={0: None, 1: gradients},
        single_partition_of_fp32_groups=[torch.zeros(2), torch.zeros(20, requires_grad=True)],
    )
    flatten_gradients_in_fp32(optimizer)
    wanted = torch.cat([*(one.flatten().float() for one in gradients), torch.zeros(3)])
    for found in (optimizer.flatten(gradients), optimizer.flatten_dense_tensors_aligned(gradients, 20)):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
    assert made == []
    optimizer.flatten([*gradients])
    optimizer.flatten_dense_tensors_aligned([*gradients], alignment=4)
    assert made == ["plain", "aligned"], "other tensors are DeepSpeed's"


@pytest.mark.parametrize(
    ("stage", "lines"),
    [
        (
            "stage_1_and_2",
            [
                "flat_grad_partition = self.flatten(self.averaged_gradients[i])",
                "self.flatten_dense_tensors_aligned(self.averaged_gradients[i],",
            ],
        ),
        ("stage3", ["single_grad_partition = self.flatten(self.averaged_gradients[sub_group_id]).to("]),
    ],
)
def test_deepspeed_flattens_gradients_where_the_patch_expects_it(stage: str, lines: list[str]) -> None:
    source = (Path(importlib.util.find_spec("deepspeed").origin).parent / f"runtime/zero/{stage}.py").read_text()  # type: ignore[union-attr,arg-type]
    assert all(line in source for line in lines)


def test_the_gradients_of_a_sub_group_at_stage_3_are_copied_once() -> None:
    gradients = [torch.randn(12).bfloat16(), torch.randn(5).bfloat16()]
    optimizer = SimpleNamespace(
        flatten=lambda tensors: torch.cat([*tensors]),
        averaged_gradients={0: gradients},
        fp32_partitioned_groups_flat=[torch.zeros(17, requires_grad=True)],
    )
    wanted = optimizer.flatten(gradients).to(torch.float32)
    flatten_gradients_in_fp32(optimizer)
    found = optimizer.flatten(gradients)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)
    assert not hasattr(optimizer, "flatten_dense_tensors_aligned")


def test_an_optimizer_with_other_partitions_flattens_as_before() -> None:
    plain = lambda tensors: tensors  # noqa: E731
    optimizer = SimpleNamespace(flatten=plain, averaged_gradients={0: []})
    flatten_gradients_in_fp32(optimizer)
    assert optimizer.flatten is plain


def test_deepspeed_creates_the_hpz_group_with_each_model_and_the_patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed import comm
    from deepspeed.utils import groups

    made: list[list[int]] = []
    monkeypatch.setattr(comm, "is_initialized", lambda: True)
    monkeypatch.setattr(comm, "get_world_size", lambda group=None: 4 if group is None else len(group))
    monkeypatch.setattr(comm, "get_rank", lambda group=None: 3)
    monkeypatch.setattr(comm, "new_group", lambda ranks: made.append([*ranks]) or [*ranks])
    monkeypatch.setattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
    create = groups._create_zero_param_parallel_group
    monkeypatch.setattr(groups, "_create_zero_param_parallel_group", getattr(create, "original", create))
    groups._create_zero_param_parallel_group(2)
    with pytest.raises(AssertionError, match="already initialized"):
        groups._create_zero_param_parallel_group(2)
    reuse_hpz_group()
    groups._create_zero_param_parallel_group(2)
    assert made == [[0, 1], [2, 3]]
    groups._create_zero_param_parallel_group(8)
    assert made[2:] == [[0, 1, 2, 3]], "of another size, as in the tests' processes"
    reuse_hpz_group()
    assert groups._create_zero_param_parallel_group.original is create, "wrapped once"


def test_an_optimizer_without_that_norm_is_left_alone() -> None:
    optimizer = SimpleNamespace()
    use_foreach_norms(optimizer)
    assert vars(optimizer) == {}


def test_the_subgroups_of_stage_3_are_moved_by_its_private_methods() -> None:
    calls: list[tuple[str, int]] = []

    def record(name: str) -> Any:
        return lambda index: calls.append((name, index))

    methods = {name: record(name) for name in Zero3Subgroups.PRIVATE}
    subgroups = Zero3Subgroups(SimpleNamespace(fp16_groups=[1, 2], **methods))
    assert len(subgroups) == 2
    assert subgroups.is_on_nvme(0) is False
    for act in (subgroups.swap_in, subgroups.swap_out, subgroups.update_weights, subgroups.release):
        act(1)
    assert [name for name, _ in calls] == list(Zero3Subgroups.PRIVATE)


def test_without_compilation_a_function_stays_as_it_is() -> None:
    assert patches._keep_function(dynamic=True)(len) is len


# Patches of torch.distributed: what they do, that they can be undone, and that torch still needs them.


TIMEOUT = timedelta(seconds=77)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    yield
    assert not dist.is_initialized()


def functions() -> dict[str, Any]:
    names = (*LOGGED_COLLECTIVES, "new_group")
    found = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    return found | {f"c10d.{name}": getattr(c10d, name) for name in ("all_gather_into_tensor", "new_group")}


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(CPU).options._timeout


def test_torch_gives_a_new_group_half_an_hour_whatever_the_world_has() -> None:
    """Fails once a new group takes the timeout of the default group: then `_with_timeout` can go."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        assert timeout_of(dist.new_group()) == timedelta(minutes=30)
    finally:
        dist.destroy_process_group()


def test_new_groups_get_the_timeout_of_the_run_or_their_own() -> None:
    world = TorchWorld.join(CPU, TIMEOUT)
    try:
        assert timeout_of(dist.new_group()) == TIMEOUT
        assert timeout_of(c10d.new_group()) == TIMEOUT, "DeepSpeed may take it from here"
        assert timeout_of(dist.new_group(timeout=timedelta(seconds=5))) == timedelta(seconds=5)
    finally:
        world.close()


def test_closing_puts_all_functions_back_and_a_second_world_starts_from_zero() -> None:
    before = functions()
    for _ in range(2):
        world = TorchWorld.join(CPU, TIMEOUT)
        assert all(inspect.unwrap(function) is not function for function in functions().values())
        assert len(functions()) == len(before)
        assert world.sum([1.0]) == [1.0]
        names = [name for entry in world.log.snapshot().values() for name in entry["names"]]
        assert names == ["new_group", "all_reduce"]
        world.close()
        assert functions() == before


def test_a_start_that_fails_puts_all_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no network")

    before = functions()
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(ValueError, match="no network"):
        TorchWorld.join(CPU, TIMEOUT)
    assert functions() == before


def test_every_logged_collective_takes_a_group() -> None:
    """Otherwise it would be counted for the default group."""
    assert [name for name in LOGGED_COLLECTIVES if hasattr(dist, name)]
    for name in LOGGED_COLLECTIVES:
        if hasattr(dist, name):
            assert "group" in inspect.signature(getattr(dist, name)).parameters, name


def test_a_patch_wraps_once() -> None:
    patches = CollectivePatches(CollectiveLog(), TIMEOUT)
    before = dist.all_reduce
    patches.apply()
    try:
        assert dist.all_reduce.__wrapped__.__wrapped__ is before
    finally:
        patches.undo()
    assert dist.all_reduce is before


@pytest.mark.parametrize("visible", ["GPU-00000001-0000-0000-0000-000000000000", "MIG-4f6a1c1e", "3,1"])
@pytest.mark.parametrize("is_patched", [False, True])
def test_free_memory_does_not_depend_on_the_names_of_gpus(
    visible: str, is_patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-ml-py is installed, and has one GPU."""

    def get_handle(index: int) -> int:
        if index > 0:
            raise ValueError(f"no GPU {index}")
        return index

    nvml = SimpleNamespace(nvmlDeviceGetHandleByIndex=get_handle)
    monkeypatch.setattr(cuda_accelerator, "pynvml", nvml)
    monkeypatch.setattr(CUDA_Accelerator, "available_memory", CUDA_Accelerator.available_memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (5, 9))
    accelerator = CUDA_Accelerator.__new__(CUDA_Accelerator)
    if not is_patched:
        with pytest.raises(ValueError, match=r"invalid literal|no GPU 3"):
            accelerator.available_memory(0)
        return
    ask_cuda_for_free_memory()
    assert accelerator.available_memory(0) == 5


def test_a_gpu_that_does_not_tell_its_free_memory_has_what_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(CUDA_Accelerator, "available_memory", CUDA_Accelerator.available_memory)
    monkeypatch.setattr("torch.cuda.mem_get_info", fail)
    monkeypatch.setattr(CUDA_Accelerator, "total_memory", lambda self, device: 9)
    monkeypatch.setattr(CUDA_Accelerator, "memory_allocated", lambda self, device: 2)
    ask_cuda_for_free_memory()
    assert CUDA_Accelerator.__new__(CUDA_Accelerator).available_memory(0) == 7


def test_disabled_collectives_return_at_once_and_change_nothing() -> None:
    patches = CollectivePatches(CollectiveLog(), TIMEOUT)
    patches.apply()
    try:
        patches.is_disabled = True
        value = torch.ones(2)
        work = dist.all_reduce(value, async_op=True)  # there is no process group
        assert work.is_completed()
        assert work.wait()
        assert value.tolist() == [1, 1]
    finally:
        patches.undo()
