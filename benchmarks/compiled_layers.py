"""Measure torch.compile on each decoder layer, with dynamic shapes, in a DeepSpeed engine: time, graph breaks, recompiles.

    python -m benchmarks.compiled_layers [--preset zero3] [--backend aot_eager] [--attention outside]

The recipe key `compile` is refused; this is the measurement behind it. Both engines take the same steps on packed rows of
different lengths, and their losses and gradient norms are compared. `--attention outside` keeps the compiler from
tracing the attention of packed rows.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.common import join_alone, made_engine, made_task, ratio, run
from dstrain.data.loading.loader import make_batch

SIZES = (2, 3, 4, 1, 3)
"""Pairs of each micro-batch."""


def measure(
    *,
    preset: str = "zero0",
    shape: str = "tiny",
    length: int = 48,
    backend: str = "inductor",
    attention: str = "inside",
    rounds: int = 4,
) -> dict[str, Any]:
    """Compare losses and gradient norms of plain and compiled layers, then time steps that change no weight."""
    import torch._dynamo

    from dstrain.models.attention.packed import PackedAttention

    world, counters = join_alone(), torch._dynamo.utils.counters
    if attention == "outside":
        PackedAttention.__call__ = torch.compiler.disable(PackedAttention.__call__)  # type: ignore[method-assign]
    sgd = {"optim": {"name": "sgd", "lr": 1e-3}, "model": {"gradient_checkpointing": False}}
    task = made_task(shape, length, 64, sgd)
    examples = task.examples("train")
    starts = [sum(SIZES[:index]) for index in range(len(SIZES))]
    steps = [
        [make_batch(examples, task.collate, [*range(start, start + size)], 0)]
        for start, size in zip(starts, SIZES, strict=True)
    ]
    told: dict[str, list[tuple[float, float]]] = {}
    seconds: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    for name in ("plain", "compiled"):
        engine = made_engine(task, preset, world)
        if name == "compiled":
            for layer in engine.train_module.model.model.layers:
                layer.compile(dynamic=True, backend=backend)
        began = time.perf_counter()
        told[name] = [(float(result.loss), result.grad_norm) for result in (engine.step(step, 1e-3) for step in steps)]
        first[name] = time.perf_counter() - began
        seconds[name] = [_time_step(engine, step) for _ in range(rounds) for step in steps]
    worst = max(
        abs(a - b) / abs(a) for one, other in zip(*told.values(), strict=True) for a, b in zip(one, other, strict=True)
    )
    assert worst <= 1e-5, f"losses or norms differ by {worst:.1e}"
    rows = [{"layers": name, "first_steps_s": first[name], **ratio(seconds, name, "plain")} for name in told]
    graphs = {"graph_breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}
    settings = {
        "preset": preset,
        "shape": shape,
        "length": length,
        "backend": backend,
        "attention": attention,
        "rounds": rounds,
    }
    return {"settings": settings | graphs, "checked": f"losses and norms within {worst:.1e}", "rows": rows}


def _time_step(engine: Any, step: Any) -> float:
    began = time.perf_counter()
    engine.step(step, 0.0)
    return time.perf_counter() - began


if __name__ == "__main__":
    run(measure, __doc__ or "")
