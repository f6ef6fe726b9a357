"""Measure the error of a bf16 step's gradient against the fp32 sum: `python -m benchmarks.accumulation`.

The table compares gradients summed in bf16, DeepSpeed's default, with a preset as dstrain completes it. One process on the
CPU; `--processes 2` also covers the sums over ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.workers import Workers

IN_BF16 = {"data_types": {"grad_accum_dtype": "bf16"}}
OVER_FP32 = {"communication_data_type": "fp32"}
PRESETS = ("zero0", "zero1", "zero2", "zero3")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--processes", type=int, default=1)
    words.add_argument("--micro-batches", default="1,8,64", help="counts for each process")
    asked = words.parse_args()
    counts = [int(count) for count in asked.micro_batches.split(",")]
    workers, folder = Workers(asked.processes), Path(tempfile.mkdtemp())
    variants = {"DeepSpeed's default": IN_BF16, "as completed": {}, "as completed, sent in fp32": OVER_FP32}
    print(
        f"| {asked.processes} process(es), micro-batches | {' | '.join(map(str, counts))} |\n|---|{'---|' * len(counts)}"
    )
    try:
        for preset in PRESETS:
            for name, more in variants.items():
                path = folder / f"{preset}.json"
                path.write_text(json.dumps({"zero_optimization": {"stage": int(preset[-1])}, **more}))
                cells = [
                    max(workers("tests.parity.accumulate_cases:error", preset=str(path), micro_batches=count))
                    for count in counts
                ]
                print(f"| {preset}, {name} | {' | '.join(f'{cell:.1e}' for cell in cells)} |", flush=True)
    finally:
        workers.close()


if __name__ == "__main__":
    main()
