"""dstrain pairs: preference pairs out of scored answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from dstrain.data.formats.answers import SIDES, read_prompt_answers
from dstrain.data.formats.messages import IMAGE_KEYS, read_images
from dstrain.data.formats.preferences import Response
from dstrain.data.records import as_record
from dstrain.data.sources.base import Source
from dstrain.data.sources.open import open_source
from dstrain.data.vision.images import resolve_image
from dstrain.errors import BadRecord, DataError, UsageError
from dstrain.files import atomic_write


@dataclass
class PairReport:
    """What became of the records of a scored file."""

    records: int = 0
    pairs: int = 0
    ties: int = 0
    """Records whose answers all have scores that are equal, or nearer than the least margin."""
    too_few: int = 0
    """Records with fewer than two different answers that have a score and are not empty."""
    margins: list[float] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """Characters of the chosen and of the rejected answer of each pair."""

    def as_json(self) -> dict[str, Any]:
        """Return the counts and means. `chosen_longer` counts a tie of lengths as one half."""
        count = max(self.pairs, 1)
        longer = sum((chosen > rejected) + 0.5 * (chosen == rejected) for chosen, rejected in self.lengths)
        return {
            "records": self.records,
            "pairs": self.pairs,
            "ties": self.ties,
            "too_few": self.too_few,
            "mean_margin": sum(self.margins) / count,
            "mean_chosen_length": sum(chosen for chosen, _ in self.lengths) / count,
            "mean_rejected_length": sum(rejected for _, rejected in self.lengths) / count,
            "chosen_longer": longer / count,
        }


def make_pairs(scored: Path, to: Path, column: str, min_margin: float, all_pairs: bool) -> PairReport:
    """Write the pairs of a scored file, a line of JSON for each, and return what became of its records.

    `column`: name of the score, as `dstrain score` writes it. `all_pairs`: each pair of answers with the margin, not only the
    best against the worst. Raises UsageError, DataError.
    """
    if to.is_dir() or not to.absolute().parent.is_dir():
        raise UsageError(f"--to {to}: is not a file in a folder that exists; name one")
    source, report = open_source(scored), PairReport()
    if source.bad_rows:
        bad = source.bad_rows[0]
        raise DataError(f"{bad.location}: {bad.reason}")
    lines = [
        json.dumps(pair, ensure_ascii=False) + "\n"
        for pair in _iter_pairs(source, scored.absolute().parent, report, column, min_margin, all_pairs)
    ]
    if not lines:
        problem = f"{scored}: makes no pair ({report.ties} ties, {report.too_few} records with fewer than two answers)"
        raise DataError(f"{problem}; generate with --num-samples above 1 and a temperature, or lower --min-margin")
    atomic_write(to, "".join(lines))
    return report


def _iter_pairs(
    source: Source, folder: Path, report: PairReport, column: str, min_margin: float, all_pairs: bool
) -> Iterator[dict[str, Any]]:
    for index in range(len(source)):
        record = source[index]
        report.records += 1
        try:
            prompt, scored, tools = _read_scored(record, column)
            images = _find_images(record, folder)
        except BadRecord as fault:
            if record.get("error") is not None:  # `dstrain score` could not read the record either
                report.too_few += 1
                continue
            raise DataError(f"{source.location(index)}: {fault.reason}") from None
        ordered = sorted(scored, key=lambda one: -one[0])  # of equal scores the first stays first
        if len(ordered) < 2:
            report.too_few += 1
            continue
        candidates = combinations(ordered, 2) if all_pairs else [(ordered[0], ordered[-1])]
        found = [(high, low) for high, low in candidates if high[0] > low[0] and high[0] - low[0] >= min_margin]
        report.ties += not found
        for (high, chosen), (low, rejected) in found:
            report.pairs += 1
            report.margins.append(high - low)
            report.lengths.append((_length(chosen), _length(rejected)))
            pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            more = {"tools": tools} if tools else {}
            yield pair | {"chosen_score": high, "rejected_score": low} | more | ({"images": images} if images else {})


def _find_images(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the absolute paths of a record's images, since the pairs may go to another folder. Raises BadRecord."""
    found = [resolve_image(image, folder) for image in read_images(record)]
    if any(isinstance(image, bytes) for image in found):
        raise BadRecord("an image is in the record itself, which a line of JSON cannot hold; write it to a file")
    return [str(image) for image in found]


def _read_scored(record: Mapping[str, Any], column: str) -> tuple[Any, list[tuple[float, Response]], Any]:
    """Return the prompt, (score, answer) of each different answer that has both, and the tools. Raises BadRecord."""
    parsed = read_prompt_answers(as_record(record).without(*IMAGE_KEYS))
    names = [f"{side}_{column}" for side in SIDES] if parsed.form == "pair" else [f"{column}s"]
    if parsed.form == "answer" or any(name not in record for name in names):
        problem = "has a single answer" if parsed.form == "answer" else f"has no '{names[0]}'"
        raise BadRecord(f"the record {problem}; give a file that `dstrain score` wrote for several answers to a prompt")
    scores = [record[name] for name in names] if parsed.form == "pair" else record[names[0]]
    if not isinstance(scores, list) or len(scores) != len(parsed.answers):
        raise BadRecord(
            f"'{names[0]}' does not have a score for each of the {len(parsed.answers)} answers; score it again"
        )
    found: dict[str, tuple[float, Response]] = {}
    for score, answer in zip(scores, parsed.answers, strict=True):
        if isinstance(score, bool) or not isinstance(score, int | float | None):
            raise BadRecord(f"'{names[0]}' has {score!r:.40}, which is not a number; score it again")
        if score is not None and score == score and _length(answer):
            found.setdefault(json.dumps(answer, sort_keys=True), (float(score), answer))
    return parsed.prompt, [*found.values()], [*parsed.tools]


def _length(answer: Response) -> int:
    """Return the characters of an answer, without the space around it."""
    texts = [answer] if isinstance(answer, str) else [str(message.get("content") or "") for message in answer]
    return sum(len(text.strip()) for text in texts)


def show_report(report: PairReport, to: Path) -> str:
    """Return the counts as text."""
    row = report.as_json()
    lengths = f"{row['mean_chosen_length']:.4g} and {row['mean_rejected_length']:.4g} characters"
    return "\n".join(
        (
            f"{report.pairs} pairs of {report.records} records: {to}",
            f"mean margin {row['mean_margin']:.4g}; chosen and rejected answers have {lengths} on average; the longer "
            f"one is chosen in {100 * row['chosen_longer']:.3g} %",
            f"{report.ties} records are ties, {report.too_few} have fewer than two different answers with a score",
        )
    )
