"""Every key of `data` applies to a task of one's own, or is refused; what it encodes is cached under its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dstrain.config.schema import RunConfig
from dstrain.errors import DataError, DstrainError, TaskError
from dstrain.tasks import make_task
from dstrain.tasks.common.record_task import policy_of
from dstrain.tasks.common.task import DATA_KEYS, load_split

HEAD = """
from dataclasses import dataclass
import torch
from dstrain.task import BadRecord, Batch, Loss, RecordTask, Task, open_source

@dataclass(frozen=True, kw_only=True)
class Own({base}):
    bias: float = 0.0

    def collate(self, examples):
        return Batch({{"y": torch.zeros(len(examples))}}, weight=len(examples), samples=tuple(range(len(examples))), tokens=0)

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return Loss(model(batch.tensors["y"][:, None]).sum())
"""
RAW = HEAD.format(base="RecordTask")
ENCODED = (
    RAW
    + """
    def encode_record(self, record):
        if record["n"] < 0:
            raise BadRecord("n is negative")
        return {"input_ids": [record["n"]] * (record["n"] % 3), "n": record["n"]}
"""
)
PLAIN = (
    HEAD.format(base="Task")
    + """
    def examples(self, split):
        return [0, 1] if split == "train" else None
"""
)


pytestmark = pytest.mark.usefixtures("fresh_cache")


def write(path: Path, *numbers: int, **columns: Any) -> str:
    path.write_text("".join(json.dumps({"n": n, "text": f"text {n}", **columns}) + "\n" for n in numbers))
    return str(path)


def make(folder: Path, code: str, name: str = "own.py", **recipe: Any) -> Any:
    (folder / name).write_text(code)
    return make_task(RunConfig.model_validate({"task": str(folder / name), "steps": 1, **recipe}))


def numbers(dataset: Any) -> list[int]:
    return [dataset[index]["n"] for index in range(len(dataset))]


@pytest.mark.parametrize("code", [RAW, ENCODED])
def test_records_are_cut_mixed_and_split_as_data_says(tmp_path: Path, code: str) -> None:
    files = [write(tmp_path / "a.jsonl", *range(10)), write(tmp_path / "b.jsonl", *range(100, 140))]
    train = [{"path": files[0], "weight": 3}, {"path": files[1], "weight": 0.5}]
    task = make(tmp_path, code, data={"train": train, "eval_fraction": 0.25, "max_samples": 8})
    found, held_out = load_split(task, "train"), load_split(task, "eval")
    assert found is not None
    assert held_out is not None
    assert (found.sizes, found.weights) == ((6, 6), (3.0, 0.5))
    assert (held_out.sizes, held_out.weights) == ((2, 2), (1.0, 1.0))
    assert sorted(numbers(found) + numbers(held_out)) == [*range(8), *range(100, 108)]


def test_records_reach_collate_as_they_are_without_an_encoder(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 1, 2, place=7, sample="own")
    task = make(tmp_path, RAW, data={"train": path, "columns": {"text": "words"}})
    assert task.examples("train")[1] == {"n": 2, "words": "text 2", "place": 7, "sample": "own"}


@pytest.mark.parametrize("code", [RAW, ENCODED])
def test_bad_records_are_skipped_or_refused_as_on_error_says(tmp_path: Path, code: str) -> None:
    path = Path(write(tmp_path / "a.jsonl", 1, 2, 3))
    path.write_text(path.read_text() + "no json\n")
    with pytest.raises(DataError, match=r"1 of 4 records \(25.0%\) cannot be used, above the 1% limit"):
        make(tmp_path, code, data={"train": str(path)}).examples("train")
    dataset = make(tmp_path, code, data={"train": str(path), "on_error": "skip"}).examples("train")
    assert (len(dataset), dataset.report["skipped"], dataset.report["read"]) == (3, 1, 4)


def test_a_bad_record_of_the_encoder_is_listed_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 1, -2, 3)
    with pytest.raises(DataError, match=r"a.jsonl:2: n is negative"):
        make(tmp_path, ENCODED, data={"train": path}).examples("train")
    with pytest.raises(ValueError, match="n is negative"):
        make(tmp_path, ENCODED).checks.parse_record({"n": -1})


@pytest.mark.parametrize("code", [RAW, ENCODED])
def test_equal_values_of_eval_group_are_on_one_side(tmp_path: Path, code: str) -> None:
    lines = [{"n": n, "document": f"d{n % 5}"} for n in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": str(tmp_path / "a.jsonl"), "eval_fraction": 0.2, "eval_group": "document"}
    task = make(tmp_path, code, data=data)
    columns = [*task.examples("train").report["columns"].values()]
    assert not any("document" in one["unused"] for one in columns), "it is read"
    held_out = {n % 5 for n in numbers(task.examples("eval"))}
    assert (len(held_out), held_out & {n % 5 for n in numbers(task.examples("train"))}) == (1, set())
    with pytest.raises(
        DataError, match=r"^data.eval_group: is 'doc', and a record has the columns n, document only; name"
    ):
        make(tmp_path, code, data={**data, "eval_group": "doc"}).examples("train")


def test_a_task_says_what_keeps_records_together(tmp_path: Path) -> None:
    code = ENCODED + "\n    def split_group(self, record):\n        return record['n'] % 4\n"
    task = make(tmp_path, code, data={"train": write(tmp_path / "a.jsonl", *range(40)), "eval_fraction": 0.25})
    train, held_out = ({n % 4 for n in numbers(task.examples(split))} for split in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (3, 1, set())


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("data.max_samples", {"max_samples": 5}), ("data.eval_fraction", {"eval_fraction": 0.5}),
        ("data.on_error", {"on_error": "fail"}), ("data.columns", {"columns": {"a": "b"}}),
        ("data.train[].weight", {"train": [{"path": "a.jsonl", "weight": 3}]}),
        ("data.eval_group", {"eval_fraction": 0.5, "eval_group": "a"}),
    ],
)  # fmt: skip
def test_a_key_that_a_task_does_not_apply_is_refused(tmp_path: Path, key: str, data: dict[str, Any]) -> None:
    with pytest.raises(
        TaskError, match=rf"{key.replace('[]', '..')}: is set, but task .*own.py reads its files in its own"
    ):
        make(tmp_path, PLAIN, data=data)
    make(tmp_path, ENCODED, "other.py", data=data)
    reads = PLAIN.replace("bias:", f"data_keys = {DATA_KEYS}\n    bias:")
    make(tmp_path, reads, "third.py", data=data)


def test_examples_that_are_no_sequence_are_refused(tmp_path: Path) -> None:
    code = PLAIN.replace('[0, 1] if split == "train" else None', "(one for one in [0, 1])")
    with pytest.raises(TaskError, match=r"examples\('train'\) returned a generator; return a list or another sequence"):
        load_split(make(tmp_path, code), "train")


def test_the_code_of_a_task_derived_from_a_packaged_one_is_in_the_key(tmp_path: Path) -> None:
    code = """
from dataclasses import dataclass
from dstrain.tasks.sft import SFT

@dataclass(frozen=True, kw_only=True)
class Own(SFT):
    limit: int = {}
"""
    digests = []
    for number in (1, 2):
        task = make(tmp_path, code.format(number), f"own{number}.py")
        digests.append(policy_of(task.recipe).code)
    assert None not in digests
    assert digests[0] != digests[1]
    assert policy_of(RunConfig.model_validate({"task": "sft"})).code is None


def test_proteins_are_grouped_by_similarity_alone() -> None:
    recipe = {"task": "protein", "data": {"train": "x", "eval_fraction": 0.1, "eval_group": "path"}}
    with pytest.raises(
        TaskError, match=r"data.eval_group: is set, but task protein reads .*, without this key; leave it out$"
    ):
        make_task(RunConfig.model_validate(recipe))


def test_an_edit_of_the_code_or_of_an_option_encodes_again(tmp_path: Path) -> None:
    data = {"train": write(tmp_path / "a.jsonl", 1, 2)}
    first = make(tmp_path, ENCODED, data=data).examples("train")
    again = make(tmp_path, ENCODED, data=data, optim={"lr": 1.0}).examples("train")
    assert first.store.folder == again.store.folder
    # Another file stands for the same one after an edit: a process imports a file once.
    edited = make(tmp_path, ENCODED.replace('"n": record["n"]}', '"n": record["n"] + 1}'), "edited.py", data=data)
    assert numbers(edited.examples("train")) == [2, 3]
    option = make(tmp_path, ENCODED, data=data, options={"bias": 2.0}).examples("train")
    assert option.store.folder != first.store.folder


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('return [{"n": record["n"]}, {"n": -record["n"]}]', [1, -1, 2, -2]),
        ('yield {"n": record["n"]}\n        yield {"n": 0}', [1, 0, 2, 0]),
        ('return [{"n": 5}] if record["n"] == 1 else []', [5]),
        ('return BadRecord("odd") if record["n"] == 1 else {"n": 9}', [9]),
    ],
)
def test_a_record_may_give_several_examples(tmp_path: Path, body: str, found: list[int]) -> None:
    code = f"{RAW}\n    def encode_record(self, record):\n        {body}\n"
    data = {"train": write(tmp_path / "a.jsonl", 1, 2), "on_error": "skip"}
    assert numbers(make(tmp_path, code, data=data).examples("train")) == found


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return None", "encode_record returned NoneType where it has to return a dict of columns"),
        ("return ['a']", "encode_record returned str where it has to return a dict of columns"),
        (
            'return {"text": record["text"]}',
            r"column 'text' of .*a.jsonl:1 is a str; .*encode text as token ids or bytes",
        ),
        ('return {"y": [[0.5, 1.0]]}', r"column 'y' of .*a.jsonl:1 is a list of list; .*: flatten it"),
        ('return {"y": record["n"] / 2 if record["n"] == 2 else 1}', r"column 'y' of .*a.jsonl:2 holds floats"),
        ('return {"y": None}', r"column 'y' of .*a.jsonl:1 is None; a column holds numbers"),
    ],
)
def test_what_no_column_holds_is_refused_with_task_column_and_record(tmp_path: Path, body: str, problem: str) -> None:
    code = f"{RAW}\n    def encode_record(self, record):\n        {body}\n"
    with pytest.raises(TaskError, match=f"task .*own.py: {problem}"):
        make(tmp_path, code, data={"train": write(tmp_path / "a.jsonl", 1, 2)}).examples("train")


def test_lengths_are_those_of_the_columns_that_the_task_names(tmp_path: Path) -> None:
    data = {"train": write(tmp_path / "a.jsonl", 1, 2)}
    dataset = make(tmp_path, ENCODED, data=data).examples("train")
    assert dataset.sequence_lengths(np.arange(2)).sequences.tolist() == [[1], [2]]
    named = ENCODED.replace("bias:", 'token_columns = ("ids",)\n    bias:')
    with pytest.raises(
        TaskError, match=r"token_columns names 'ids', which no example has; its columns are input_ids, n"
    ):
        make(tmp_path, named, "named.py", data=data).examples("train")


def test_a_collate_that_drops_the_positions_of_its_base_class_is_refused(tmp_path: Path) -> None:
    code = """
from dataclasses import dataclass
from dstrain.tasks.vlm import VLM

@dataclass(frozen=True, kw_only=True)
class Own(VLM):
    def collate(self, examples{more}):
        return super().collate(examples{more})
"""
    with pytest.raises(DstrainError, match=r"Own.collate overrides SFT.collate, which takes the samples' positions"):
        make(tmp_path, code.format(more=""))
    make(tmp_path, code.format(more=", positions=None"), "other.py")
