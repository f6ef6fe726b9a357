"""Operations, bytes and launches of a pass, and the speed that published peaks allow: computed, nothing is measured.

    python -m benchmarks.roofline [--to docs/measurements/roofline.md]

The rules are those of dstrain/planner/roofline.py. Launches are the measured ones of docs/measurements/kernels-peers.md,
where it has the same case.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, format_certificate, table, write_table
from benchmarks.kernel_peers import CASES as PEER_CASES
from benchmarks.kernel_peers import EAGER, FUSED
from benchmarks.planner import make_config, make_preset
from dstrain.planner.gpu_peaks import PEAKS
from dstrain.planner.memory import plan_memory
from dstrain.planner.roofline import COMMON_GPUS, PassCost, bound_speed, compute_cost
from dstrain.planner.workload import Cluster
from dstrain.units import format_count

CASES: dict[str, dict[str, Any]] = {
    "1B sft, 4,096 tokens": {"task": "sft", "model": "llama-3.2-1b", "length": 4096},
    **{
        name: PEER_CASES[name]
        for name in ("8B sft, LoRA", "8B sft, LoRA, nf4", "0.5B dpo", "0.5B rm", "LLaVA 7B, LoRA")
    },
}
"""Name -> a case of benchmarks/planner_allocator.py, of one row or pair in a micro-batch."""
WAYS = {"none": EAGER, "liger": FUSED}
"""Value of model.kernels -> its rows in PEERS."""
PEERS = ROOT / "docs" / "measurements" / "kernels-peers.md"


def cost_of(case: dict[str, Any], kernels: str) -> PassCost:
    """Return the cost of a micro-batch of a case."""
    settings = {**case.get("set", {}), "model.kernels": kernels}
    complete = {"preset": "zero2", "micro": 1, **case, "set": settings}
    plan = plan_memory(make_config(complete, {}), make_preset(complete), Cluster())
    cost = compute_cost(plan.run)
    assert cost is not None, "shapes of the planner's tables"
    return cost


def read_launches(page: Path = PEERS) -> dict[tuple[str, str], int]:
    """Return (case, trainer) -> launches of a micro-batch, as the first table of a page has them."""
    launches = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[-1].isdecimal():
            launches[cells[0], cells[1]] = int(cells[-1])
    return launches


def list_rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    launches = read_launches()
    for name, case in CASES.items():
        for kernels, way in WAYS.items():
            cost, count = cost_of(case, kernels), launches.get((name, way))
            row = {
                "case": name,
                "kernels": kernels,
                "FLOPs/token": format_count(cost.flops_per_token),
                "recomputed": format_count(cost.recomputed_flops / cost.tokens),
                "bytes/token": format_count(cost.bytes_per_token),
                "FLOPs/byte": round(cost.intensity),
                "launches": count,
            }
            for gpu in COMMON_GPUS:
                speed, by = bound_speed(cost, PEAKS[gpu], count)
                row[gpu] = f"{format_count(speed)}, {by}"
            yield row


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="page to write the table into")
    arguments = parser.parse_args()
    record = format_certificate(hardware="none: computed from published peaks")
    write_table(f"{record}\n\n{table([*list_rows()])}", "benchmarks.roofline", arguments.to)


if __name__ == "__main__":
    main()
