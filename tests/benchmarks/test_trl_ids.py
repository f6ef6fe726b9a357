"""Pairs become the ids that TRL 1.16 makes of them, uncut and cut; what differs by design is named, and nothing else does."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.data.encoding.chat_template import to_template_messages
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.formats.preferences import read_preference
from dstrain.errors import BadRecord
from tests.chat_templates import KINDS, PAIRS, TEMPLATES, TEXTS, chat, tokenizer_of
from tests.vocabulary import message

pytest.importorskip("trl", reason="TRL is not installed; pip install trl==1.16.0")

import trl
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

BOTH = [(family, kind) for family in TEMPLATES for kind in KINDS]
LENGTHS = (1000, 70, 60, 50, 45, 40, 35, 30, 20)
SINGLE = [name for name, record in PAIRS.items() if len(record["prompt"]) == 1]
"""Pairs without older turns, of which TRL's keep_start and dstrain cut the same."""


def theirs(tokenizer: Any, record: dict[str, Any], max_length: int | None = None) -> dict[str, Any] | None:
    """`chosen`, `rejected` and `prompt_length` by TRL's own preparation and collator; None where it leaves the pair out."""
    given = dict(record)
    if not isinstance(record["prompt"], str) and isinstance(record["chosen"], str):
        given |= {side: [message("assistant", record[side])] for side in ("chosen", "rejected")}
    settings = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start")
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    made = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([given]), tokenizer, settings, "train")
    if not len(made):
        return None
    assert DPOConfig.truncation_mode == "keep_start", "its default is what is compared"
    found = DataCollatorForPreference(pad_token_id=-1, max_length=max_length)([made[0]])
    rows = [[token for token in row.tolist() if token != -1] for row in found["input_ids"]]
    return {"chosen": rows[0], "rejected": rows[1], "prompt_length": int(found["completion_mask"][0].tolist().index(1))}


def ours(tokenizer: Any, record: dict[str, Any], max_length: int = 10_000) -> dict[str, Any] | None:
    (found,) = encode_preferences(tokenizer, [read_preference(record)], max_length)
    if isinstance(found, BadRecord):
        return None
    return {name: found[name] for name in ("chosen", "rejected", "prompt_length")}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_dialogs_have_trls_ids(family: str, kind: str, name: str) -> None:
    tokenizer = chat(family, kind)
    assert ours(tokenizer, PAIRS[name]) == theirs(tokenizer, PAIRS[name])


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_dialogs_of_one_turn_are_cut_as_trl_cuts_them(family: str, kind: str, name: str) -> None:
    tokenizer = chat(family, kind)
    found = [(ours(tokenizer, PAIRS[name], length), theirs(tokenizer, PAIRS[name], length)) for length in LENGTHS]
    assert all(own == other for own, other in found), "left out by both, or cut by both at the answer's end"
    assert {own is None for own, _ in found} == {False, True}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_texts_have_trls_ids(kind: str, name: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert ours(tokenizer, TEXTS[name]) == theirs(tokenizer, TEXTS[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_bos_that_the_tokenizer_adds_by_itself_changes_no_dialog(family: str, kind: str) -> None:
    tokenizer = chat(family, kind, adds_bos=True)
    assert all(ours(tokenizer, record) == theirs(tokenizer, record) for record in PAIRS.values())


@pytest.mark.parametrize("name", sorted(PAIRS.keys() - set(SINGLE)))
@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_by_design_older_turns_are_cut_from_the_left_before_anything_of_an_answer(
    family: str, kind: str, name: str
) -> None:
    """TRL keeps the start of each row, so that a long dialog loses its answer, and with it the whole pair."""
    tokenizer = chat(family, kind)
    whole = theirs(tokenizer, PAIRS[name])
    assert whole is not None
    bos = 1 if family == "llama3" else 0
    shifted = 0
    for length in LENGTHS:
        own = ours(tokenizer, PAIRS[name], length)
        if own is None:
            continue
        gone = whole["prompt_length"] - own["prompt_length"]
        shifted += gone > 0
        for side in ("chosen", "rejected"):
            kept = [*whole[side][:bos], *whole[side][bos + gone :]]
            assert own[side] == kept[:length], "a stretch of TRL's uncut row, behind its BOS"
    assert shifted


SHIPPED = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize(
    "template", [path for path in SHIPPED if "_training" not in path.stem], ids=lambda path: path.stem
)
def test_every_template_that_trl_ships_gives_its_ids_and_keeps_the_last_turn(template: Path) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("byte-level"))
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    # Written in parts for templates that read nothing else, as dstrain does by itself.
    record = PAIRS["a long answer"]
    parts = [{**turn, "content": to_template_messages(tokenizer, [turn])[0]["content"]} for turn in record["prompt"]]
    said_so = {
        side: to_template_messages(tokenizer, [message("assistant", record[side])]) for side in ("chosen", "rejected")
    }
    given = {"prompt": parts, **said_so}
    whole = ours(tokenizer, record)
    assert whole is not None
    assert whole == theirs(tokenizer, given)
    longest = max(len(whole["chosen"]), len(whole["rejected"]))
    cut = [found for length in range(10, longest) if (found := ours(tokenizer, record, length)) is not None]
    heads = [tokenizer.decode(found["chosen"][: found["prompt_length"]]) for found in cut]
    assert all("where is the dog?" in head for head in heads)
    assert "the quick brown fox" not in heads[0], "older turns went first"


@pytest.mark.parametrize("kind", KINDS)
def test_by_design_a_plain_prompt_is_a_users_turn_where_there_is_a_template(kind: str) -> None:
    tokenizer = chat("qwen", kind)
    dialog = {**TEXTS["plain"], "prompt": [message("user", TEXTS["plain"]["prompt"])]}
    dialog |= {side: TEXTS["plain"][side].removeprefix(" ") for side in ("chosen", "rejected")}
    assert ours(tokenizer, TEXTS["plain"]) == theirs(tokenizer, dialog) != theirs(tokenizer, TEXTS["plain"])
