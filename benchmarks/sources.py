"""Measure a start with cached tokens: private memory, bytes read, and files looked at.

    python -m benchmarks.sources [--mib 200] [--photos 2000] [--root FOLDER]

A parquet file of that size, and records with that many small images; one process per start. `--root`: the folder of another
version of the package to compare with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import run
from tests.vision_recipes import llava, picture
from tests.workers import ROOT

START = """
import json, os, sys, time
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
try:
    from dstrain.cache import check_once as images_checked
except ImportError:
    from contextlib import nullcontext as images_checked
import pyarrow, pyarrow.parquet, PIL.Image, transformers
calls, stat = [0], os.stat
def counted(*args, **options):
    calls[0] += 1
    return stat(*args, **options)
os.stat = counted
def own():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:"))
def read():
    return int(open("/proc/self/io").readline().split()[1])
task = make_task(RunConfig.model_validate(json.loads(sys.argv[1])))
known = json.loads(sys.argv[2])
before, begun, seconds = own(), read(), time.perf_counter()
calls[0] = 0
with images_checked(*([known] if known else [])):
    examples = task.examples("train")
print(json.dumps({"own_mib": round((own() - before) / 1024, 1), "read_mib": round((read() - begun) / 2**20, 1),
    "stat_calls": calls[0], "seconds": round(time.perf_counter() - seconds, 3), "folder": str(examples.store.folder),
    "examples": len(examples)}))
"""


def recipes(folder: Path, mib: int, photos: int) -> dict[str, dict[str, Any]]:
    """Return recipes for a parquet file of dialogs, mostly a column that no task reads, and for a file of captions."""
    import pyarrow
    import pyarrow.parquet

    count, filler = 2000, mib * 2**20 // 2000
    rows = {
        "prompt": [f"What is {n}?" for n in range(count)],
        "completion": [f"It is {n}." for n in range(count)],
        "page": [os.urandom(filler) for _ in range(count)],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "text.parquet", row_group_size=100)
    for index in range(photos):
        picture(index, (16, 16)).save(folder / f"{index}.png")
    lines = [{"image": f"{index}.png", "caption": f"photo number {index}"} for index in range(photos)]
    (folder / "photos.jsonl").write_text("\n".join(map(json.dumps, lines)))
    small = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 300}
    return {
        "parquet": {
            "task": "sft",
            "model": {"config": small},
            "data": {"train": str(folder / "text.parquet"), "columns": {"page": None}},
        },
        "photos": {
            "task": "vlm",
            "model": {"config": llava(side=28), "tokenizer": {"train": "bpe", "vocab_size": 300}},
            "data": {"train": str(folder / "photos.jsonl")},
        },
    }


def start(recipe: dict[str, Any], cache: Path, root: Path, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Start one process; return its measurements."""
    environment = {**os.environ, "PYTHONPATH": str(root), "DSTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, json.dumps(recipe), json.dumps(known)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=root)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(*, mib: int = 200, photos: int = 2000, root: str = "") -> dict[str, Any]:
    """Measure for each kind of data: the first start, a cached start, and one whose host has checked the images."""
    folder, rows = Path(tempfile.mkdtemp(prefix="dstrain-bench-")), []
    versions = {"this": ROOT} | ({"other": Path(root).resolve()} if root else {})
    try:
        made = recipes(folder, mib, photos)
        time.sleep(2.5)  # files that were just written are not trusted by their timestamps
        for kind, recipe in made.items():
            for name, place in versions.items():
                cache = folder / f"cache-{name}"
                first = start(recipe, cache, place)
                again = start(recipe, cache, place)
                told = start(recipe, cache, place, (first["folder"],)) if name == "this" else again
                assert first["folder"] == again["folder"] == told["folder"]
                for when, row in (("first", first), ("again", again), ("again, not the host's first process", told)):
                    rows.append(
                        {"data": kind, "version": name, "start": when} | {k: v for k, v in row.items() if k != "folder"}
                    )
    finally:
        shutil.rmtree(folder)
    return {
        "settings": {"mib": mib, "photos": photos, "root": bool(root)},
        "checked": "each start gave the same store of tokens",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
