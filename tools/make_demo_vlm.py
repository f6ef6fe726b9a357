"""Write the images of the packaged recipe demo-vlm and their questions: two coloured shapes side by side.

python tools/make_demo_vlm.py dstrain/recipes/demo-vlm
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 32
GROUND = (246, 243, 236)
COLOURS = {"red": (214, 40, 40), "green": (40, 150, 70), "blue": (40, 80, 200), "black": (25, 25, 25)}
TRAIN, TEST = 9, 2
"""Images per pair of colours."""


def drawn(left: str, right: str, draw: random.Random) -> Image.Image:
    """Return an image with a shape of each colour in its half of a plain background."""
    image = Image.new("RGB", (SIDE, SIDE), GROUND)
    pen = ImageDraw.Draw(image)
    for start, colour in ((0, left), (SIDE // 2, right)):
        size = draw.randint(8, 12)
        x, y = start + draw.randint(1, SIDE // 2 - size - 2), draw.randint(1, SIDE - size - 2)
        box = (x, y, x + size, y + size)
        match draw.choice(("disc", "square", "triangle")):
            case "disc":
                pen.ellipse(box, fill=COLOURS[colour])
            case "square":
                pen.rectangle(box, fill=COLOURS[colour])
            case "triangle":
                pen.polygon([(x + size / 2, y), (x + size, y + size), (x, y + size)], fill=COLOURS[colour])
    return image.quantize(3)


def asked(left: str, right: str) -> Iterator[tuple[str, str]]:
    """Return questions about an image and their answers."""
    yield "What is on the left?", f"Something {left}."
    yield "What is on the right?", f"Something {right}."
    yield "What is there?", f"Something {left} and something {right}."


def main(folder: Path) -> None:
    draw = random.Random(7)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TRAIN), ("eval", TEST)):
        pairs = [*itertools.product(COLOURS, COLOURS)] * count
        draw.shuffle(pairs)
        lines = []
        for number, pair in enumerate(pairs):
            name = f"images/{split}-{number}.png"
            drawn(*pair, draw).save(folder / name, optimize=True)
            rows = [{"image": name, "question": text, "answer": answer} for text, answer in asked(*pair)]
            lines += [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
