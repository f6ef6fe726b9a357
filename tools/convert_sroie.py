"""Turn receipts of SROIE into questions about documents, for task docqa.

python tools/convert_sroie.py SROIE TO [--pdf] [--pages N] [--eval-fraction 0.2] [--seed 0]

SROIE is a folder with fields.jsonl ({"image", "company", "date", "address", "total"}), images/ and ocr_boxes/ (per
image a csv of lines x1,y1,x2,y2,x3,y3,x4,y4,text), as of ICDAR 2019's task 3. The command writes

    TO/train/questions.jsonl   TO/train/documents/     receipts to train on
    TO/eval/questions.jsonl    TO/eval/documents/      the other receipts: none is in both

Without an option each document is a receipt's image, with its text in a .txt file beside it. --pdf writes PDFs instead,
with the image and an invisible text layer of the OCR boxes (needs fpdf2). --pages N binds N receipts in one document
(a PDF, or a folder of images), and the records name the page with the answer under evidence_pages. There a question
names other fields of its receipt; one that fits two receipts of its document is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL import Image

from dstrain.tasks.docqa.pages import read_boxes

REPOSITORY = Path(__file__).resolve().parents[1]
FIELDS = ("company", "date", "address", "total")
SINGLE_QUESTIONS = {
    "company": "Which company issued the receipt?",
    "date": "What is the date of the receipt?",
    "address": "What is the address of the company?",
    "total": "What is the total amount?",
}
BOUND_QUESTIONS = {
    "company": "Which company issued the receipt of {date} with the total {total}?",
    "date": "What is the date of the receipt of {company} with the total {total}?",
    "address": "What is the address of {company}?",
    "total": "What is the total amount of the receipt of {company} of {date}?",
}
POINTS_PER_PIXEL = 0.5
"""Size of a PDF page: rendered at 144 dpi it has the pixels of the image."""
CREATED = datetime(2019, 1, 1, tzinfo=UTC)
"""Fixed, so that equal receipts give equal files."""


@dataclass(frozen=True)
class Receipt:
    """An image, its fields and its recognized text."""

    image: Path
    fields: dict[str, str]
    boxes: str

    @property
    def text(self) -> str:
        return read_boxes(self.boxes)

    @property
    def name(self) -> str:
        return self.image.stem


def read_receipts(folder: Path) -> list[Receipt]:
    """Return the receipts of fields.jsonl, in its order."""
    receipts = []
    for line in (folder / "fields.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        image = folder / row["image"]
        boxes = folder / "ocr_boxes" / f"{image.stem}.csv"
        text = boxes.read_text(encoding="utf-8", errors="replace") if boxes.is_file() else ""
        receipts.append(Receipt(image, {name: row[name].strip() for name in FIELDS if row.get(name)}, text))
    return receipts


def split_receipts(receipts: Sequence[Receipt], eval_fraction: float, seed: int) -> dict[str, list[Receipt]]:
    """Return the receipts of each split, shuffled; one at least is held out."""
    shuffled = random.Random(seed).sample(receipts, len(receipts))
    count = max(1, round(eval_fraction * len(shuffled)))
    return {"train": shuffled[count:], "eval": shuffled[:count]}


def make_questions(document: str, receipts: Sequence[Receipt]) -> Iterator[dict[str, Any]]:
    """Yield the records of a document with one receipt per page."""
    templates = SINGLE_QUESTIONS if len(receipts) == 1 else BOUND_QUESTIONS
    for page, receipt in enumerate(receipts, 1):
        for field, template in templates.items():
            if field not in receipt.fields or not {*re.findall(r"\{(\w+)\}", template)} <= receipt.fields.keys():
                continue
            question = template.format(**receipt.fields)
            same = [other.fields.get(field) for other in receipts if _is_asked_by(template, question, other)]
            if len(same) > 1:
                continue
            yield {
                "question": question,
                "answers": accepted_answers(field, receipt.fields[field]),
                "document": document,
                "evidence_pages": [page],
            }


def _is_asked_by(template: str, question: str, receipt: Receipt) -> bool:
    try:
        return template.format(**receipt.fields) == question
    except KeyError:
        return False


def accepted_answers(field: str, value: str) -> list[str]:
    """Return the value as annotated, and a total also without its currency."""
    number = re.sub(r"^(RM|\$|USD|MYR)\s*", "", value) if field == "total" else value
    return [value] if number == value else [value, number]


def write_images(folder: Path, name: str, receipts: Sequence[Receipt]) -> str:
    """Write the receipts' images and texts; return the document's name in the folder."""
    single = len(receipts) == 1
    target = folder if single else folder / name
    target.mkdir(exist_ok=True)
    for page, receipt in enumerate(receipts, 1):
        file = target / (receipt.image.name if single else f"page{page}{receipt.image.suffix}")
        shutil.copyfile(receipt.image, file)
        file.with_suffix(".txt").write_text(receipt.text, encoding="utf-8")
    return receipts[0].image.name if single else name


def write_pdf(folder: Path, name: str, receipts: Sequence[Receipt]) -> str:
    """Write a PDF with a page per receipt: its image, and its OCR boxes as invisible text; return its name."""
    from fpdf import FPDF
    from fpdf.enums import TextMode

    pdf = FPDF(unit="pt")
    pdf.set_creation_date(CREATED)
    pdf.set_auto_page_break(False)
    pdf.set_font("Helvetica")
    for receipt in receipts:
        with Image.open(receipt.image) as image:
            width, height = (side * POINTS_PER_PIXEL for side in image.size)
        pdf.add_page(format=(width, height))
        pdf.image(receipt.image, x=0, y=0, w=width, h=height)
        with pdf.local_context(text_mode=TextMode.INVISIBLE):
            for left, bottom, size, text in _iter_boxes(receipt.boxes):
                pdf.set_font_size(size)
                pdf.text(left, bottom, text)
    pdf.output(str(folder / f"{name}.pdf"))
    return f"{name}.pdf"


def _iter_boxes(content: str) -> Iterator[tuple[float, float, float, str]]:
    """Yield (left, bottom, font size, text) of each box in points; the PDF's font has Latin letters only."""
    for line in content.splitlines():
        parts = line.split(",", 8)
        if len(parts) == 9 and parts[8].strip():
            xs, ys = sorted(map(float, parts[0:8:2])), sorted(map(float, parts[1:8:2]))
            size = max(ys[-1] - ys[0], 2) * POINTS_PER_PIXEL
            text = parts[8].strip().encode("latin-1", "replace").decode("latin-1")
            yield xs[0] * POINTS_PER_PIXEL, ys[-1] * POINTS_PER_PIXEL, size, text


def convert(source: Path, target: Path, options: argparse.Namespace) -> dict[str, int]:
    """Write both splits; return the number of questions of each."""
    counts = {}
    write = write_pdf if options.pdf else write_images
    splits = split_receipts(read_receipts(source), options.eval_fraction, options.seed)
    for split, receipts in splits.items():
        folder = target / split
        (folder / "documents").mkdir(parents=True, exist_ok=True)
        rows = []
        for start in range(0, len(receipts), options.pages):
            bound = receipts[start : start + options.pages]
            name = bound[0].name if options.pages == 1 else f"receipts{start // options.pages + 1}"
            rows += make_questions(write(folder / "documents", name, bound), bound)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
        counts[split] = len(rows)
    return counts


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Turn receipts of SROIE into questions about documents.")
    parser.add_argument("source", type=Path, help="folder with fields.jsonl, images/ and ocr_boxes/")
    parser.add_argument("target", type=Path, help="folder to write train/ and eval/ into, outside of the repository")
    parser.add_argument("--pdf", action="store_true", help="write PDFs with a text layer instead of images")
    parser.add_argument("--pages", type=int, default=1, help="receipts per document")
    parser.add_argument("--eval-fraction", type=float, default=0.2, help="share of the receipts that is held out")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split")
    options = parser.parse_args(arguments)
    if options.pages < 1 or not 0 < options.eval_fraction < 1:
        parser.error("--pages is 1 or more, and --eval-fraction between 0 and 1")
    if not (options.source / "fields.jsonl").is_file():
        parser.error(f"{options.source} has no fields.jsonl")
    if options.target.resolve().is_relative_to(REPOSITORY):
        parser.error(f"{options.target} is in the repository, which holds no data; name another folder")
    for split, count in convert(options.source, options.target, options).items():
        print(f"{options.target / split / 'questions.jsonl'}: {count} questions")


if __name__ == "__main__":
    main(sys.argv[1:])
