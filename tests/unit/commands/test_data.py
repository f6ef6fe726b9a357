"""`dstrain data`: files are read as tasks read them, and records shown as models see them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.data import check_file
from dstrain.config.schema import RunConfig
from dstrain.tasks import find_task, make_task
from tests.vocabulary import invoke, write_recipe

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
    write_recipe(folder, find_task(task).tiny(folder))
    found = invoke("data", "show", folder / "train.jsonl", "--recipe", folder / "recipe.yaml", "--limit", 2, *words)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_learnt_tokens_are_marked_as_the_loss_mask_has_them(tmp_path: Path) -> None:
    text = shown("sft", tmp_path, "--set", "data.max_length=80")
    made: Any = make_task(RunConfig.model_validate(find_task("sft").tiny(tmp_path)))
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
    write_recipe(tmp_path, find_task("sft").tiny(tmp_path))
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n{"prompt": "One", "completion": "two"}\n')
    found = invoke("data", "show", tmp_path / "bad.jsonl", "--recipe", tmp_path / "recipe.yaml")
    assert found.exit_code == 0, found.output
    assert f"--- {tmp_path}/bad.jsonl:1: cannot be used: " in found.stdout
    assert "⟦two" in found.stdout


def test_without_a_model_there_are_no_tokens_to_show(tmp_path: Path) -> None:
    found = invoke("data", "show", tmp_path / "a.jsonl", "--task", "sft")
    assert found.exit_code == 2
    assert "add --set model.path=FOLDER" in found.stderr
    assert "records are not texts" in invoke("data", "show", tmp_path / "a.jsonl", "--task", "protein").stderr
    assert "--task, or a recipe with --recipe" in invoke("data", "show", tmp_path / "a.jsonl").stderr


def test_a_model_folder_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = find_task("sft").tiny(tmp_path)
    made: Any = make_task(RunConfig.model_validate(values))
    made.build_model().save_pretrained(tmp_path / "base")
    made.model_source.save_processor(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    words = ("data", "train.jsonl", "--task", "sft", "--set", "model.path=base", "--set", "data.max_length=80")
    shown, checked = (invoke(words[0], command, *words[1:]) for command in ("show", "check"))
    assert "tokens, " in shown.stdout, shown.output
    assert "samples" in checked.output, checked.output
    assert (shown.exit_code, checked.exit_code) == (0, 0)
