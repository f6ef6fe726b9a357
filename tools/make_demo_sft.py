"""Write the synthetic dialogs of the packaged recipe demo-sft: each fault in a workshop has one fix to learn.

python tools/make_demo_sft.py dstrain/recipes/demo-sft
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from make_demo_rm import FAULTS, OPENERS, THINGS

MENDS = dict(
    zip(
        FAULTS,
        (
            ("oil the bearing", "replace the belt"),
            ("test the fuse", "replace the switch"),
            ("clean the filter", "test the fan"),
            ("tighten the valve", "replace the seal"),
            ("take out and dry the cable", "test the spring"),
            ("clean the switch", "replace the cable"),
        ),
        strict=True,
    )
)


def dialog(opener: str, thing: str, fault: str, longer: bool) -> dict[str, Any]:
    first, second = MENDS[fault]
    turns = [f"{opener}My {thing} {fault}. What can I do?", f"First unplug the {thing}, then {first}."]
    if longer:
        turns += ["And if that does not help?", f"Then {second} of the {thing}."]
    return {"messages": [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]}


def main(folder: Path) -> None:
    draw = random.Random(7)
    rows = [dialog(*words, longer=draw.random() < 0.5) for words in itertools.product(OPENERS, THINGS, FAULTS)]
    draw.shuffle(rows)
    folder.mkdir(exist_ok=True)
    for name, part in (("train", rows[:240]), ("eval", rows[240:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
