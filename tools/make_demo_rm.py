"""Write the synthetic pairs of the packaged recipe demo-rm: workshop questions, a helpful and a useless answer.

python tools/make_demo_rm.py dstrain/recipes/demo-rm
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

THINGS = ("pump", "kettle", "lathe", "lamp", "bicycle", "drill", "printer", "fan", "clock", "radio", "stove", "mixer")
PARTS = ("bearing", "belt", "switch", "cable", "filter", "seal", "spring", "screw", "fuse", "valve")
FAULTS = ("makes a loud noise", "does not start", "gets very hot", "leaks oil", "stops after a minute", "smells burnt")
WAYS = ("clean", "tighten", "replace", "oil", "test", "take out and dry")
OPENERS = ("", "Hello! ", "Quick question: ", "I need some help. ")
RUDE = (
    "Figure it out yourself.",
    "That is a boring question.",
    "Not my problem.",
    "Just buy a new one and stop asking.",
)
VAGUE = (
    "It could be anything, really.",
    "Hard to say.",
    "Things like that happen sometimes.",
    "There is not much to say about it.",
)


def steps(draw: random.Random, thing: str) -> str:
    first, second = draw.sample(PARTS, 2)
    order = [f"unplug the {thing}", f"{draw.choice(WAYS)} the {first}", f"{draw.choice(WAYS)} the {second}"]
    return f"{', then '.join(order[: draw.randint(2, 3)])}. If the {thing} still fails, check the {draw.choice(PARTS)}."


def talk(draw: random.Random, sentences: tuple[str, ...], length: int) -> str:
    """Return sentences of one kind, about as long as the helpful answer, so that length does not predict the choice."""
    wanted, text = length * draw.uniform(0.75, 1.25), draw.choice(sentences)
    while True:
        longer = f"{text} {draw.choice([sentence for sentence in sentences if sentence not in text] or sentences)}"
        if abs(len(longer) - wanted) >= abs(len(text) - wanted):
            return text
        text = longer


def pair(draw: random.Random) -> dict[str, str]:
    thing, fault = draw.choice(THINGS), draw.choice(FAULTS)
    prompt = f"\n\nHuman: {draw.choice(OPENERS)}My {thing} {fault}. What can I do?"
    if draw.random() < 0.25:
        prompt += f"\n\nAssistant: How old is the {thing}?\n\nHuman: About {draw.randint(2, 30)} years."
    good = f"First {steps(draw, thing)}"
    other = draw.choice([word for word in THINGS if word != thing])
    bad = draw.choice([talk(draw, RUDE, len(good)), talk(draw, VAGUE, len(good)), f"First {steps(draw, other)}"])
    return {"chosen": f"{prompt}\n\nAssistant: {good}", "rejected": f"{prompt}\n\nAssistant: {bad}"}


def main(folder: Path) -> None:
    draw, seen = random.Random(7), set()
    for name, count in (("train", 1200), ("eval", 200)):
        rows = []
        while len(rows) < count:
            row = pair(draw)
            if row["chosen"] not in seen:
                seen.add(row["chosen"])
                rows.append(row)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
