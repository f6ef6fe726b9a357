"""`dstrain data`: files are read as tasks read them, and records shown as models see them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.data import TOKENS_HINT, check_file
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from tests.tiny import tiny_recipe
from tests.unit.data.pdb_files import helix, pdb_text
from tests.vocabulary import invoke, write_jsonl, write_recipe

OWN_TASK = """
from dataclasses import dataclass

from dstrain.data.sources.open import open_source
from dstrain.task import Batch, Loss, RecordTask


@dataclass(frozen=True, kw_only=True)
class Own(RecordTask):
    def open_source(self, item):
        return open_source(item, {"body": "text"})

    def encode_record(self, record):
        return {"ids": [*record["text"].encode()]}

    def collate(self, examples): ...

    def build_model(self): ...

    def loss(self, model, batch): ...
"""


def test_a_file_is_read_as_the_task_reads_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    report, _ = check_file(str(tmp_path / "a.jsonl"), str(tmp_path / "own.py"), [])
    assert (report.read, len(report.bad)) == (2, 0)


def shown(task: str, folder: Path, *words: str) -> str:
    """Return what `dstrain data show` prints of two records of a tiny recipe."""
    write_recipe(folder, tiny_recipe(task, folder))
    found = invoke("data", "show", folder / "train.jsonl", "--recipe", folder / "recipe.yaml", "--limit", 2, *words)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_learnt_tokens_are_marked_as_the_loss_mask_has_them(tmp_path: Path) -> None:
    text = shown("sft", tmp_path, "--set", "data.max_length=80")
    made: Any = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path)))
    config = made.recipe.model_copy(update={"data": made.recipe.data.model_copy(update={"max_length": 80})})
    examples = make_task(config).examples("train")
    assert examples is not None
    for number, example in enumerate(examples[index] for index in range(2)):
        ids, mask = example["input_ids"], example["loss_mask"]
        header = f"--- {tmp_path}/train.jsonl:{number + 1}: {len(ids)} tokens, {int(mask.sum())} of them learnt\n"
        block = text.partition(header)[2].partition("\n---")[0]
        assert block.replace("⟦", "").replace("⟧", "") == made.tokenizer.decode(ids), "every token, special ones too"
        learnt = "".join(part.partition("⟧")[0] for part in block.split("⟦")[1:])
        assert learnt == made.tokenizer.decode(ids[mask == 1])
    assert "⟦ Gladly: " in text
    lengths = ", ".join(str(len(examples[index]["input_ids"])) for index in range(2))
    assert text.endswith(f"tokens without padding: {lengths}\n")


def test_colors_take_the_place_of_marks(tmp_path: Path) -> None:
    text = shown("sft", tmp_path, "--color")
    assert "\x1b[32m Gladly: " in text
    assert "⟦" not in text


def test_pairs_are_shown_with_both_answers_and_their_shared_prompt(tmp_path: Path) -> None:
    text = shown("dpo", tmp_path)
    assert "train.jsonl:1, chosen: " in text
    assert "train.jsonl:1, rejected: " in text
    assert "Assistant:⟦ No idea, go away.</s>⟧" in text
    assert "a prefix + (its answers) is computed once" in text


def test_images_are_named_with_their_size(tmp_path: Path) -> None:
    text = shown("vlm", tmp_path)
    assert re.search(r"Human: <\S+train-1-0\.png, 19 x 10: \d+ tokens>\nWhich colour\?", text)
    assert re.search(r"^image 1: \S+train-1-0\.png, 19 x 10$", text, re.MULTILINE)


def test_a_series_is_shown_by_its_number_of_soft_tokens(tmp_path: Path) -> None:
    assert re.search(r"Human:(?: )?Curve\?\n\nAssistant:⟦ (rises|falls)</s>⟧", text := shown("temporal", tmp_path)), (
        text
    )
    assert len(re.findall(r"<series: \d+ soft tokens>", text)) == 2


def test_a_bad_record_is_shown_with_its_reason(tmp_path: Path) -> None:
    write_recipe(tmp_path, tiny_recipe("sft", tmp_path))
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n{"prompt": "One", "completion": "two"}\n')
    found = invoke("data", "show", tmp_path / "bad.jsonl", "--recipe", tmp_path / "recipe.yaml")
    assert found.exit_code == 0, found.output
    assert f"--- {tmp_path}/bad.jsonl:1: cannot be used: " in found.stdout
    assert "⟦two" in found.stdout


def test_without_a_model_there_are_no_tokens_to_show(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    found = invoke("data", "show", tmp_path / "a.jsonl", "--task", "sft")
    assert found.exit_code == 2
    assert "add --set model.path=FOLDER" in found.stderr
    assert "records are not texts" in invoke("data", "show", tmp_path / "a.jsonl", "--task", tmp_path / "own.py").stderr
    assert "--task, or a recipe with --recipe" in invoke("data", "show", tmp_path / "a.jsonl").stderr


def test_a_model_folder_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny_recipe("sft", tmp_path)
    made: Any = make_task(RunConfig.model_validate(values))
    made.build_model().save_pretrained(tmp_path / "base")
    made.model_source.save_processor(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    words = ("data", "train.jsonl", "--task", "sft", "--set", "model.path=base", "--set", "data.max_length=80")
    shown, checked = (invoke(words[0], command, *words[1:]) for command in ("show", "check"))
    assert "tokens, " in shown.stdout, shown.output
    assert "samples" in checked.output, checked.output
    assert (shown.exit_code, checked.exit_code) == (0, 0)


def show_plain(file: Path, task: str, *settings: str) -> str:
    found = invoke("data", "show", file, "--task", task, *(word for one in settings for word in ("--set", one)))
    assert found.exit_code == 0, found.output
    return found.stdout


def test_series_are_shown_with_their_ends(tmp_path: Path) -> None:
    records = [
        {"series": [[float(at) for at in range(12)], [None, 2.5] * 6], "label": "up", "caption": "rises"},
        {"series": "1,2,3", "label": "up"},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    assert show_plain(path, "temporal", "options.stage=classify").splitlines() == [
        f"--- {path}:1",
        "2 channels of 12 values",
        "channel 1: 0, 1, 2, 3, …, 8, 9, 10, 11 (from 0 to 11)",
        "channel 2: nan, 2.5, nan, 2.5, …, nan, 2.5, nan, 2.5 (from 2.5 to 2.5, 6 missing)",
        "label: up",
        f"--- {path}:2: cannot be used: 'series' is not a list; write a list of numbers, or a list of channels",
    ]
    path = write_jsonl(tmp_path / "y.jsonl", records[:1])
    lines = show_plain(path, "temporal").splitlines()  # stage align: captions
    assert lines[-2:] == ["caption: rises", f"--- {TOKENS_HINT}"]


def test_structures_are_shown_with_their_chains_and_unknown_types(tmp_path: Path) -> None:
    pytest.importorskip("gemmi")
    (tmp_path / "pdb" / "sub").mkdir(parents=True)
    (tmp_path / "pdb" / "sub" / "a.pdb").write_text(pdb_text(helix(["A", "XYZ", "H", "E", "A"])))
    (tmp_path / "pdb" / "b.bcif").write_bytes(b"\x81")
    assert show_plain(tmp_path / "pdb", "protein").splitlines() == [
        f"--- {tmp_path}/pdb/sub/a.pdb",
        "chain A: 5 residues; types A 2, X 1, H 1, E 1; unknown types: XYZ 1 (1 of 5 residues, never a target)",
        "AXHEA",
        f"--- {tmp_path}/pdb: 1 file not read: .bcif 1",
    ]


def test_questions_are_shown_with_their_pages(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    for name in ("page2.png", "page10.png"):
        (tmp_path / "scan").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "scan" / name)
    record = {"document": "scan", "question": "What?", "answers": ["red", "a red one"], "evidence_pages": [2]}
    path = write_jsonl(tmp_path / "x.jsonl", [record])
    assert show_plain(path, "docqa").splitlines() == [
        f"--- {path}:1",
        "document: scan",
        "page: 2",
        "question: What?",
        "answer: red | a red one",
        f"--- {TOKENS_HINT}",
    ]


def test_a_check_counts_subfolders_and_files_that_are_not_read_once(tmp_path: Path) -> None:
    pytest.importorskip("gemmi")
    for name in ("a", "b", "c"):
        (tmp_path / "pdb" / name).mkdir(parents=True)
        (tmp_path / "pdb" / name / "x.pdb").write_text(pdb_text(helix(["A", "HIE", "CYX", "UNK", "A"])))
    for name in ("x.bcif", "y.cif.bz2", "z.BCIF", "README", ".hidden"):
        (tmp_path / "pdb" / name).write_bytes(b"x")
    found = invoke("data", "check", tmp_path / "pdb", "--task", "protein")
    assert found.exit_code == 0, found.output
    shape = "3 chains: 5 residues; unknown types: UNK 3 (3 of 15 residues, never a target)"
    assert found.stdout.splitlines() == [
        "3 good records, 0 bad",
        f"{tmp_path}/pdb: 3 records; {shape}; read: path",
        f"{tmp_path}/pdb: 4 files not read: without a suffix 1, .bcif 2, .cif.bz2 1",
    ]


def test_a_file_is_read_as_the_recipe_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = tiny_recipe("sft", tmp_path)
    (tmp_path / "alpaca.jsonl").write_text('{"ask": "Add 1.", "out": "2"}\n' * 3)
    (tmp_path / "held.jsonl").write_text('{"q": "Add 2.", "a": "3"}\n' * 2)
    (tmp_path / "other.jsonl").write_text('{"ask": "Add 1.", "out": "2"}\n')
    renamed = {"path": "alpaca.jsonl", "columns": {"ask": "instruction", "out": "output"}}
    values["data"] |= {"train": ["train.jsonl", renamed], "eval": {"path": "held*.jsonl", "columns": {"q": "prompt", "a": "completion"}}}  # fmt: skip
    values["data"].pop("eval_fraction", None)
    write_recipe(tmp_path, values)
    checked = invoke("data", "check", "./alpaca.jsonl", "--recipe", "recipe.yaml")
    assert checked.exit_code == 0, checked.output
    assert "3 good records, 0 bad" in checked.stdout
    line = "read as data.train.1 of recipe.yaml, columns {'ask': 'instruction', 'out': 'output'}"
    assert line in checked.stdout
    shown = invoke("data", "show", tmp_path / "alpaca.jsonl", "--recipe", "recipe.yaml")
    assert line in shown.stdout
    assert "Add 1." in shown.stdout
    checked = invoke("data", "check", "held.jsonl", "--recipe", "recipe.yaml")
    assert "2 good records, 0 bad" in checked.stdout
    assert "read as data.eval of recipe.yaml, columns {'a': 'completion', 'q': 'prompt'}" in checked.stdout
    refused = invoke("data", "check", "other.jsonl", "--recipe", "recipe.yaml")
    assert refused.exit_code == 2
    assert "recipe.yaml does not name this file" in refused.stderr


def test_images_of_a_checked_file_are_looked_up_in_the_recipes_folder(tmp_path: Path) -> None:
    values = tiny_recipe("vlm", tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "lists/train.jsonl")
    values["data"]["train"] = {"path": str(tmp_path / "lists/train.jsonl"), "media_dir": str(tmp_path)}
    write_recipe(tmp_path, values)
    checked = invoke("data", "check", tmp_path / "lists/train.jsonl", "--recipe", tmp_path / "recipe.yaml")
    assert checked.exit_code == 0, checked.output
    assert f"media_dir {tmp_path}" in checked.stdout
