"""Worker functions of the GPU tests."""

from __future__ import annotations

import gc
import json
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import made_engine, made_model
from benchmarks.loader import made_loader
from benchmarks.loading import anonymous, bf16_task
from dstrain.batch import Progress
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld, World, data_parallel_rank
from dstrain.models.params import ParamGroup, gathered
from dstrain.patching import replaced
from dstrain.preset import read_preset
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.optimizers import make_optimizer
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.health.trainability import NonFiniteGuard
from tests.gpu.workers import device
from tests.parity.cases import share_sequences, tiny_task
from tests.resume import cases as resume_cases
from tests.workers import worker_world

SAMPLES_PER_STEP = 7  # no even number, so that shares and micro-batches differ


def world() -> World:
    return worker_world()


def made(kind: str, task: Any, accumulate: int, precision: str) -> Any:
    """`torch` for the definition, else the name or path of a preset. Collective."""
    if kind == "torch":
        return TorchEngine(*made_model(task), task.recipe.optim, device())
    return made_engine(task, kind, world(), precision=precision, accumulate=accumulate)


def batches_of(task: Any, step: int, ranks: World, accumulate: int) -> list[Any]:
    """This rank's micro-batches, cut as the plan cuts them."""
    examples = task.examples("train")
    ids = (np.arange(SAMPLES_PER_STEP) + step * SAMPLES_PER_STEP) % len(examples)
    share_sequences(ranks, task.recipe.parallel.sequence if ranks.size > 1 else 1)
    rank, size = data_parallel_rank(ranks)
    chunks = np.array_split(ids, size * accumulate)[rank * accumulate : (rank + 1) * accumulate]
    return [
        make_batch(examples, task.collate, chunk.tolist(), int(ids[0]), sequence=ranks.sequence) for chunk in chunks
    ]


def steps(
    kind: str, count: int = 1, accumulate: int = 2, changes: Mapping[str, Any] | None = None, precision: str = "fp32"
) -> dict[str, Any]:
    """Losses and gradient norms of some steps, and the weights before and after them. Collective."""
    task = tiny_task("rm", dict(changes or {}))
    engine = made(kind, task, accumulate, precision)
    ranks = SingleProcessWorld(device()) if kind == "torch" else world()
    module = engine.train_module if kind == "torch" else engine.engine.module
    before, losses, norms, applied = weights(module), [], [], []
    guard, told = watched(precision == "fp16")
    for step in range(count):
        result = engine.step(batches_of(task, step, ranks, accumulate), task.recipe.optim.lr)
        loss, weight = ranks.sum([float(result.loss), result.weight])
        losses.append(loss / weight)
        norms.append(result.grad_norm)
        applied.append(result.applied)
        guard.check_step(result, Progress(step + 1, step * SAMPLES_PER_STEP))
    after = weights(module)
    clean_up(engine)
    return {"losses": losses, "norms": norms, "applied": applied, "events": told, "before": before, "after": after}


def watched(fp16: bool) -> tuple[NonFiniteGuard, list[str]]:
    """A guard that stops the run after three bad steps in a row, and the names of what it tells."""
    told: list[str] = []
    return NonFiniteGuard("stop", fp16, lambda name, **_: told.append(name)), told


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Name -> whole parameter, float64, without the engine's prefix. Collective."""
    with gathered(module.parameters()):
        return {name: p.detach().double().cpu().numpy().copy() for name, p in module.named_parameters()}


def clean_up(engine: Any) -> None:
    if hasattr(engine, "engine"):
        engine.engine.destroy()
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()


def fp16_preset(folder: str, preset: str, **fp16: Any) -> str:
    """A preset of a user's own: the shipped one with an fp16 block."""
    block = {**read_preset(preset).block, "fp16": {"enabled": True, **fp16}}
    path = Path(folder) / f"{preset}_fp16_{world().rank}.json"
    path.write_text(json.dumps(block))
    return str(path)


def fp16(folder: str, preset: str, count: int, initial_scale_power: int) -> dict[str, Any]:
    """Steps in fp16 from a loss scale that is far too large. Collective."""
    path = fp16_preset(folder, preset, initial_scale_power=initial_scale_power, hysteresis=1)
    return steps(path, count, precision="fp16", changes={"optim": {"lr": 3e-3}})


def growing_scale(folder: str, preset: str, count: int) -> dict[str, list[float]]:
    """The same step again and again at a vanishing rate, while the loss scale grows every third time.

    `moved` is how far the master weights of the head went, over the learning rate. Collective.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    task = tiny_task("rm", {"optim": {"name": "sgd", "lr": 1e-4, "clip": 0.0}})
    path = fp16_preset(folder, preset, initial_scale_power=3, loss_scale_window=3, hysteresis=1)
    engine = made(path, task, 1, "fp16")
    head = next(p for name, p in engine.engine.module.named_parameters() if "score" in name)
    batches, moved, norms, scales = batches_of(task, 0, world(), 1), [], [], []
    for _ in range(count):
        before = safe_get_full_fp32_param(head).clone()
        result = engine.step(batches, 1e-4)
        moved.append(float((safe_get_full_fp32_param(head) - before).norm()) / 1e-4)
        norms.append(float(result.grad_norm))
        scales.append(float(engine.engine.optimizer.loss_scale))
    clean_up(engine)
    return {"moved": moved, "norms": norms, "scales": scales}


def fused_and_plain(count: int) -> float:
    """Relative distance between the optimizer of the engines and plain, unfused AdamW after the same gradients."""
    from dstrain.config.schema import OptimConfig

    optim, here = OptimConfig(lr=1e-3, weight_decay=0.1), device()
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for shape in ((64, 48), (48,), (3, 5, 7))]
    ours, plain = ([torch.nn.Parameter(value.clone().to(here)) for value in start] for _ in range(2))
    first = make_optimizer([ParamGroup(ours, 1.0, 0.1)], optim, None, here)
    first.param_groups[0]["lr"] = 1e-3
    second = torch.optim.AdamW(
        plain, lr=1e-3, betas=optim.betas, eps=optim.eps, weight_decay=0.1, fused=False, foreach=False
    )
    assert here.type != "cuda" or first.defaults["fused"]
    for _ in range(count):
        for a, b in zip(ours, plain, strict=True):
            gradient = torch.randn(a.shape, generator=draw).to(here)
            a.grad, b.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    square = lambda values: sum(float(value.detach().double().square().sum()) for value in values)  # noqa: E731
    return (square([a - b for a, b in zip(ours, plain, strict=True)]) / square(plain)) ** 0.5


def pinned(workers: int) -> dict[str, Any]:
    """Whether the loader's tensors are page-locked, and whether they arrive as they were. Not collective."""
    task = tiny_task("rm")
    both = [made_loader(task, workers, 0.0, (2, 2, 4), pin).iter_steps(0) for pin in (True, False)]
    locked, same = [], []
    for ours, plain in zip(*both, strict=True):
        for a, b in zip(ours.batches, plain.batches, strict=True):
            there = a.to(device())
            locked += [tensor.is_pinned() for tensor in a.tensors.values()]
            same += [torch.equal(there.tensors[name].cpu(), b.tensors[name]) for name in b.tensors]
    return {"pinned": locked, "same": same}


def tiled_pass(tiled: Any, tokens: int) -> dict[str, Any]:
    """Gradients of a bf16 pass over one row whose layers are recomputed, and its peak of memory. Not collective."""
    sizes = {"model_type": "llama", "vocab_size": 300, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}  # fmt: skip
    model = {"config": sizes, "tiled_mlp": tiled, "dtype": "bfloat16"}
    task = tiny_task("sft", {"model": model, "batch": {"packing": False}, "data": {"max_length": tokens}})
    module = build_train_module(task).to(device()).train()
    ids = np.random.default_rng(0).integers(5, 60, tokens).astype(np.int32)
    mask = (np.arange(tokens) > 0).astype(np.int32)
    batch = task.collate([{"sample": 0, "input_ids": ids, "loss_mask": mask}]).to(device())
    has_cuda = device().type == "cuda"
    if has_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if has_cuda else 0
    module(batch)[0].backward()
    peak = torch.cuda.max_memory_allocated() - before if has_cuda else None
    gradients = {n: p.grad.double().cpu().numpy() for n, p in module.named_parameters() if p.grad is not None}
    return {"peak": peak, "gradients": gradients}


def run(**arguments: Any) -> dict[str, Any]:
    """A whole run, as the resume tests make it, on this worker's device. Collective."""
    resume_cases.world = world
    try:
        return resume_cases.run(**arguments)
    finally:
        torch.use_deterministic_algorithms(False)
        gc.collect()


def host_memory(folder: str, shape: str, preset: str) -> dict[str, int]:
    """Bytes that this process keeps on the host once a dpo run in bf16 could take its first step. Collective."""
    for name, size in (("tiny", "tiny"), ("base", shape)):  # what libraries keep comes with the tiny one
        model = {"config": None, "tokenizer": None, "path": f"{folder}/{name}"}
        task = bf16_task(Path(folder), size, "dpo", model)
        before = anonymous()
        engine = made_engine(task, preset, world(), precision="bf16")
        found = anonymous() - before
        count = sum(parameter.numel() for parameter in engine.train_module.parameters())
        clean_up(engine)
    return {"anonymous": found, "parameters": count}


def waits(task: str, preset: str) -> list[str]:
    """Return where the host waits for the GPU, from a pinned batch to the last `engine.step()`.

    Each wait is attributed to the innermost line that is not of torch. Waits for one value are those of dstrain's own
    code; waits for the whole device, which torch's debug mode does not see, are anyone's, and of the whole step.
    """
    found, made_task = [], tiny_task(task, {"optim": {"name": "sgd", "lr": 1.0, "clip": 0.0}})
    engine = made(preset, made_task, 2, "bf16")
    batches = [batch.pin_memory() for batch in batches_of(made_task, 0, world(), 2)]
    for _ in range(3):  # buffers that are made once, and timers of DeepSpeed that start at the third step
        engine.step(batches, 0.0)
    update = engine.engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if engine.engine.is_gradient_accumulation_boundary():
            torch.cuda.set_sync_debug_mode("default")
        return update(*args, **kwargs)

    def note(message: Any, *_: Any, **__: Any) -> None:
        skipped = ("/torch/", "warnings.py", __file__)
        frames = [one for one in traceback.extract_stack() if not any(name in one.filename for name in skipped)]
        if "synchroniz" in str(message) and frames and "/dstrain/" in frames[-1].filename:
            found.append(f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}")

    def wait_for_device(*args: Any, **kwargs: Any) -> None:
        frames = [one for one in traceback.extract_stack()[:-1] if "/torch/" not in one.filename]
        found.append(f"torch.cuda.synchronize <- {' <- '.join(f'{one.filename}:{one.lineno}' for one in frames[-3:])}")

    engine.engine.step = step
    with warnings.catch_warnings(), replaced(torch.cuda, "synchronize", wait_for_device):
        warnings.simplefilter("always")
        warnings.showwarning = note  # catch_warnings restores it
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step(batches, 0.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    del engine.engine.step
    clean_up(engine)
    return found


def fused_pass(family: str, precision: str) -> dict[str, Any]:
    """Loss, gradients and launches of a pass of a tiny model, eager and with fused kernels."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dstrain.models.fused_kernels import fuse_kernels, uses_interpreter
    from tests import model_families
    from tools.triton_interpreter import use_interpreter

    if uses_interpreter():  # in a rehearsal
        use_interpreter()
    values = model_families.family(family) | {"hidden_size": 64, "intermediate_size": 96}
    values |= {"head_dim": 16} if "head_dim" in values else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, precision)).to(device()).train()
    ids = torch.randint(0, 300, (2, 37), device=device())

    def run() -> tuple[float, list[torch.Tensor], int]:
        model.zero_grad()
        with torch.profiler.profile() as profile:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        launches = sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")
        grads = [one.grad.float().clone() for one in model.parameters() if one.grad is not None]
        return float(loss.detach()), grads, launches

    eager = run()
    report = fuse_kernels(model)
    run()  # compiles
    fused = run()
    apart = sum(float((one - other).square().sum()) for one, other in zip(eager[1], fused[1], strict=True))
    size = sum(float(one.square().sum()) for one in eager[1])
    return {
        "fused": dict(report.fused), "losses": [eager[0], fused[0]], "launches": [eager[2], fused[2]],
        "apart": (apart / size) ** 0.5,
    }  # fmt: skip
