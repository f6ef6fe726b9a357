"""Train a small vision-language model from scratch on easy-VQA; compare exact answers with a question-only baseline.

    DSTRAIN_DATA=DATA python -m benchmarks.easyvqa [--run DIR] [--num-gpus 2]

Trains docs/examples/easyvqa.yaml, has the last checkpoint answer the held-out questions, and prints the curve as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, certificate, table
from tests.vocabulary import read_jsonl, run_dstrain

RECIPE = ROOT / "docs" / "examples" / "easyvqa.yaml"
SHAPES = ("circle", "rectangle", "triangle")
Record = dict[str, Any]


def read(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def from_questions_alone(train: Sequence[Record], test: Sequence[Record]) -> list[str]:
    """Return the most frequent training answer to each question; the first one on ties."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for record in train:
        answers[record["question"]][record["answer"]] += 1
    common = Counter(record["answer"] for record in train)
    return [(answers[record["question"]] or common).most_common(1)[0][0] for record in test]


def shares(answers: Sequence[str], test: Sequence[Record]) -> dict[str, float]:
    """Return the share of exact answers: of all questions, and of those answered by a shape."""
    right = [answer.strip() == record["answer"] for answer, record in zip(answers, test, strict=True)]
    of_shapes = [hit for hit, record in zip(right, test, strict=True) if record["answer"] in SHAPES]
    return {"all": sum(right) / len(right), "what shape": sum(of_shapes) / len(of_shapes)}


def _seconds(row: Record) -> float:
    return datetime.fromisoformat(row["time"]).timestamp()


def measure(data: Path, run: Path, processes: int) -> dict[str, Any]:
    """Train, generate answers, count. `data` is the folder of easy-VQA."""
    files = {name: data / f"{name}.jsonl" for name in ("train", "test")}
    sets = [f"data.train={json.dumps(str(files['train']))}", f"data.eval={json.dumps(str(files['test']))}"]
    run_dstrain(
        "train",
        str(RECIPE),
        "--run-dir",
        str(run),
        "--num-gpus",
        str(processes),
        *(w for s in sets for w in ("--set", s)),
    )
    train, test = read(files["train"]), read(files["test"])
    written = run_dstrain(
        "generate",
        str(run),
        "--data",
        str(files["test"]),
        "--step",
        "last",
        "--json",
        "--max-new-tokens",
        "8",
        "--batch",
        "64",
    )
    answers = [json.loads(line)["answer"] for line in written.splitlines()]
    rows = read_jsonl(run / "metrics.jsonl")
    events = read_jsonl(run / "events.jsonl")
    began, ended = (
        next(_seconds(event) for event in events if event["event"] == name) for name in ("started", "finished")
    )
    return {
        "minutes": (ended - began) / 60,
        "parameters": next(event["parameters"] for event in events if event["event"] == "model"),
        "curve": [
            {"step": row["step"], "minutes": (_seconds(row) - began) / 60, "loss": row["loss"], "exact_match": row["exact_match"]}
            for row in rows
            if row["split"] == "eval"
        ],
        "written": shares(answers, test),
        "questions alone": shares(from_questions_alone(train, test), test),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=None)
    parser.add_argument("--num-gpus", type=int, default=2)
    told = parser.parse_args()
    data = Path(os.environ.get("DSTRAIN_DATA", ROOT.parent / "shared" / "data")) / "mm" / "easyvqa"
    run = told.run or Path(tempfile.mkdtemp()) / "easyvqa"
    found = measure(data, run, told.num_gpus)
    for key, value in certificate().items():
        print(f"{key}: {value}")
    print(f"{found['parameters']} parameters, {found['minutes']:.1f} minutes of training and looks\n")
    print(table(found["curve"]), "\n")
    print(table([{"answers": name, **found[name]} for name in ("written", "questions alone")]))


if __name__ == "__main__":
    main()
