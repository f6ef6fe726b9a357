"""Measure the tokenization of multi-turn dialogs by one process and by one process per core.

One process is timed on one core, and with the threads of the tokenizers library.

    python -m benchmarks.tokens [--data shared/data/hh/helpful-train.jsonl] [--times 4] [--what pairs]

`what`: pairs (rm, dpo), conversations (sft) or labelled (kto), written by Llama 3's template with a byte-level tokenizer of
8192 entries trained on the data. The stores must be equal to the byte.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import ratio, run, take_turns
from dstrain.config.schema import RunConfig
from dstrain.data.sources.base import ConcatSource
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import TokenStore
from dstrain.process_setup import count_available_cores
from dstrain.tasks import make_task
from tests.chat_templates import TEMPLATES

TASKS = {"pairs": "rm", "conversations": "sft", "labelled": "kto"}


def made_task(folder: Path, data: str, times: int, what: str) -> Any:
    """Return a task on `times` copies of the data with a trained tokenizer."""
    text = Path(data).read_text(encoding="utf-8")
    (folder / "train.jsonl").write_text(text * times, encoding="utf-8")
    (folder / "template.jinja").write_text(TEMPLATES["llama3"], encoding="utf-8")
    first = {"train": data, "max_length": 1024, "on_error": "skip"}
    model: dict[str, Any] = {"config": {"model_type": "llama", "vocab_size": 8192}}
    trained: Any = make_task(RunConfig.model_validate({"task": "rm", "model": model, "data": first}))
    tokenizer = trained.tokenizer
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": marks})
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    model |= {"tokenizer": str(folder / "tokenizer"), "chat_template": str(folder / "template.jinja")}
    values = {"task": TASKS[what], "model": model, "data": first | {"train": str(folder / "train.jsonl")}}
    return make_task(RunConfig.model_validate(values))


def made_store(task: Any, source: ConcatSource, folder: Path, count: int, threads: bool = True) -> TokenStore:
    """Rebuild and return the store with this many processes; `threads`: of the tokenizers library, for one process."""
    shutil.rmtree(folder, ignore_errors=True)
    env = {"DSTRAIN_CACHE": str(folder), "TOKENIZERS_PARALLELISM": str(threads).lower()}
    with (
        patch.dict(os.environ, env),
        patch("dstrain.tasks.common.record_task.count_available_cores", lambda: count),
    ):
        return task.build_store(source)


def measure(
    *, data: str = "shared/data/hh/helpful-train.jsonl", times: int = 4, what: str = "pairs", rounds: int = 3
) -> dict[str, Any]:
    """Check that the stores are equal, then time them in turns."""
    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    task = made_task(folder, data, times, what)
    source = ConcatSource([open_source(folder / "train.jsonl")])
    ways = {
        "one core": (1, False),
        "one process": (1, True),
        f"{count_available_cores()} processes": (count_available_cores(), True),
    }
    stores = [made_store(task, source, folder / f"cache-{at}", *way) for at, way in enumerate(ways.values())]
    names = [{path.name: path.read_bytes() for path in store.folder.iterdir()} for store in stores]
    assert all(files == names[0] for files in names), "the stores are equal to the byte"

    sides = {
        name: (lambda turn, way=way: made_store(task, source, folder / "again", *way)) for name, way in ways.items()
    }
    seconds = take_turns(sides, rounds, 1, torch.device("cpu"))
    rows = [{"tokens made by": name, **ratio(seconds, name, "one core")} for name in seconds]
    dialogs = len(source) * (2 if what != "conversations" else 1)
    shutil.rmtree(folder)
    return {
        "settings": {"data": data, "times": times, "what": what, "records": len(source), "answers": dialogs},
        "checked": f"the stores of {len(source)} records are equal, to the byte",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
