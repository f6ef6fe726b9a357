"""Pairs out of scored answers: the best against the worst, with what was left out counted."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vocabulary import invoke, message
from tests.workers import ROOT


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FOUR: dict[str, Any] = {"prompt": "why?", "completions": ["a", "bb", "c", "d"], "scores": [0.5, 2.0, -1.0, 1.0]}


def test_the_best_answer_is_chosen_and_the_worst_rejected(tmp_path: Path) -> None:
    said = invoke("pairs", str(write(tmp_path / "in.jsonl", FOUR)), "--to", str(tmp_path / "out.jsonl"), "--json")
    assert said.exit_code == 0, said.output
    assert read(tmp_path / "out.jsonl") == [
        {"prompt": "why?", "chosen": "bb", "rejected": "c", "chosen_score": 2.0, "rejected_score": -1.0}
    ]
    assert json.loads(said.output) == {
        "records": 1, "pairs": 1, "ties": 0, "too_few": 0, "mean_margin": 3.0, "mean_chosen_length": 2.0,
        "mean_rejected_length": 1.0, "chosen_longer": 1.0,
    }  # fmt: skip


def test_all_pairs_have_at_least_the_margin(tmp_path: Path) -> None:
    scored, to = write(tmp_path / "in.jsonl", FOUR), tmp_path / "out.jsonl"
    said = invoke("pairs", str(scored), "--to", str(to), "--all", "--min-margin", "1.5")
    assert said.exit_code == 0, said.output
    assert [(row["chosen"], row["rejected"]) for row in read(to)] == [("bb", "a"), ("bb", "c"), ("d", "c"), ("a", "c")]


def test_pairs_keep_the_images_of_their_prompt(tmp_path: Path) -> None:
    """VLFeedback, with its answers as `completions`; the pairs may go to another folder."""
    (tmp_path / "pairs").mkdir()
    rows = [{**FOUR, "image": "a/1.png"}, {**FOUR, "images": ["/2.png", {"path": "3.png"}]}]
    to = tmp_path / "pairs/out.jsonl"
    said = invoke("pairs", str(write(tmp_path / "in.jsonl", *rows)), "--to", str(to))
    assert said.exit_code == 0, said.output
    assert [row["images"] for row in read(to)] == [[str(tmp_path / "a/1.png")], ["/2.png", str(tmp_path / "3.png")]]


def test_ties_empty_and_repeated_answers_make_no_pair(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a tie", "completions": ["a", "b"], "scores": [1.0, 1.0]},
        {"prompt": "empty", "completions": ["a", " "], "scores": [1.0, 2.0]},
        {"prompt": "repeated", "completions": ["a", "a"], "scores": [1.0, 2.0]},
        {"prompt": "not scored", "completions": ["a", "b"], "scores": [1.0, None]},
        {"prompt": "nothing", "completions": [], "error": "'completions' is not a list of answers"},
        {"prompt": [message("user", "hi")], "chosen": "no", "rejected": "yes", "chosen_logp": -3, "rejected_logp": -1},
    ]
    said = invoke("pairs", str(write(tmp_path / "in.jsonl", *rows[:-1])), "--to", str(tmp_path / "out.jsonl"))
    assert said.exit_code == 2
    assert "makes no pair (1 ties, 4 records with fewer than two answers)" in said.output
    assert not (tmp_path / "out.jsonl").exists()
    pair = write(tmp_path / "pair.jsonl", rows[-1])
    said = invoke("pairs", str(pair), "--to", str(tmp_path / "out.jsonl"), "--score", "logp")
    assert said.exit_code == 0, said.output
    (row,) = read(tmp_path / "out.jsonl")
    assert (row["chosen"], row["rejected"]) == ("yes", "no")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (FOUR | {"scores": [1.0]}, "in.jsonl:1: 'scores' does not have a score for each of the 4 answers"),
        (FOUR | {"scores": [1.0, "x", 2, 3]}, "in.jsonl:1: 'scores' has 'x', which is not a number"),
        ({"prompt": "why?", "completions": ["a", "b"]}, "has no 'scores'; give a file that `dstrain score` wrote"),
        ({"prompt": "why?", "completion": "a", "score": 1.0}, "has a single answer; give a file that `dstrain score`"),
    ],
)
def test_what_was_not_scored_is_refused_with_its_line(row: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    said = invoke("pairs", str(write(tmp_path / "in.jsonl", row)), "--to", str(tmp_path / "out.jsonl"))
    assert said.exit_code == 2
    assert wanted in said.output
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_is_written_into_a_folder_that_exists(tmp_path: Path) -> None:
    scored = str(write(tmp_path / "in.jsonl", FOUR))
    for to in (tmp_path, tmp_path / "nowhere/out.jsonl"):
        said = invoke("pairs", scored, "--to", str(to))
        assert said.exit_code == 2
        assert "is not a file in a folder that exists" in said.output


PUBLISHED: dict[str, dict[str, Any]] = {
    "nectar.jsonl": {
        "prompt": "\n\nHuman: why?\n\nAssistant: ",
        "answers": [{"answer": "good", "model": "a", "rank": 1.0}, {"answer": "bad", "model": "b", "rank": 7.0}],
        "turns": 1, "num_responses": 2, "good_natured": True,
    },
    "uf.jsonl": {
        "source": "x", "instruction": "why?", "models": ["a", "b"],
        "completions": [
            {"model": "a", "response": "bad", "overall_score": 2.0, "annotations": {}},
            {"model": "b", "response": "good", "overall_score": 8.5, "annotations": {}},
        ],
    },
    "vl.jsonl": {
        "id": "1", "prompt": "why?", "img_path": "a.png", "models": ["a", "b"],
        "completions": [
            {"annotations": {"Helpfulness": {"Rating": "4", "Rationale": ""}, "Visual Faithfulness": {"Rating": "N/A"}},
             "model": "a", "response": "good"},
            {"annotations": {"Helpfulness": {"Rating": "1", "Rationale": ""}, "Visual Faithfulness": {"Rating": "2"}},
             "model": "b", "response": "bad"},
        ],
    },
}  # fmt: skip
"""File -> a record of Nectar, UltraFeedback or VLFeedback, as it is published."""


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ratings_become_pairs_by_the_line_of_the_page(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("jq ") and f" {name} " in line)
    write(tmp_path / name, PUBLISHED[name])
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True, timeout=20)
    said = invoke("pairs", str(tmp_path / "scored.jsonl"), "--to", str(tmp_path / "out.jsonl"))
    assert said.exit_code == 0, said.output
    (pair,) = read(tmp_path / "out.jsonl")
    chosen, rejected = pair["chosen"], pair["rejected"]
    if name == "nectar.jsonl":  # its prompt is a dialog in one text
        assert pair["prompt"] == [message("user", "why?")]
        (chosen,), (rejected,) = ([turn["content"] for turn in answer] for answer in (chosen, rejected))
    assert (chosen, rejected) == ("good", "bad")
    assert pair.get("images") == ([str(tmp_path / "a.png")] if name == "vl.jsonl" else None)
