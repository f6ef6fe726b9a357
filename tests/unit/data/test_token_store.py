from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from dstrain.data.encoding.chat_template import tokenizer_fingerprint
from dstrain.data.formats.preferences import read_preference
from dstrain.data.prepare import (
    ExampleSettings,
    PreparePolicy,
    check_bad_records,
    check_source,
    format_bad_rows,
    iter_encoded,
    prepare,
    read_minor_versions,
)
from dstrain.data.records import BadRow
from dstrain.data.sources.base import ConcatSource
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import BuildReport, load_or_build_store
from dstrain.errors import BadRecord, DataError, TaskError
from tests.contract.lora_cases import save_base
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke

KEY = {"what": "test", "n": 1}


def rows(count: int, start: int = 0) -> list[dict]:
    return [{"ids": list(range(i % 4)), "score": i / 2, "sample": 2 * i} for i in range(start, start + count)]


def build(report: BuildReport):
    report.kept, report.bad = 7, [BadRow("x.jsonl:1", "why")]
    yield rows(5)
    yield []
    yield rows(2, 5)


def test_a_store_gives_back_what_was_built():
    for store in (load_or_build_store(KEY, build), load_or_build_store(KEY, build)):
        assert len(store) == 7
        for got, row in zip(store, rows(7), strict=True):
            assert got["ids"].tolist() == row["ids"]
            assert got["ids"].dtype == np.int32
            assert (got["score"], got["sample"]) == (row["score"], row["sample"])
        assert store.column_lengths("ids").tolist() == [0, 1, 2, 3, 0, 1, 2]
        assert (store.report.kept, store.report.bad) == (7, [BadRow("x.jsonl:1", "why")])
        assert store.count_per_source([4, 6, 0, 9]) == (2, 3, 0, 2)
    with pytest.raises(IndexError):
        store[7]


def test_columns_are_mapped_not_loaded_and_cannot_be_changed():
    store = load_or_build_store(KEY, lambda report: [[{"ids": list(range(100)), "sample": 0}]])
    with pytest.raises(ValueError, match="read-only"):
        store[0]["ids"][0] = 5


def test_an_empty_store_is_a_store():
    built = []
    for _ in range(2):
        assert len(load_or_build_store(KEY, lambda report: built.append(1) or [])) == 0
    assert built == [1]


def encode(pairs):
    return [BadRecord("odd") if record["n"] % 2 else {"ids": [record["n"]], "head_cut": 1} for _, record in pairs]


def test_samples_are_counted_in_the_source_and_cuts_are_counted_not_kept(write_lines):
    first = open_source(write_lines([{"n": 0}, {"n": 1}, b"bad", {"n": 2}], "one.jsonl"))
    second = open_source(write_lines([{"n": 4}, {"n": 5}], "two.jsonl"))
    report, settings = BuildReport(), ExampleSettings(counted=("head_cut",))
    source = ConcatSource([first, second])
    examples = [e for chunk in iter_encoded(source, encode, report, 2, settings=settings) for e in chunk]
    assert examples == [{"ids": [0], "sample": 0}, {"ids": [2], "sample": 2}, {"ids": [4], "sample": 3}]
    assert (report.read, report.kept, report.cuts) == (6, 3, {"head_cut": 3})
    assert [row.location for row in report.bad] == ["one.jsonl:3", "one.jsonl:2", "two.jsonl:2"]


@pytest.mark.parametrize(
    ("bad", "on_error", "refused"),
    [
        (0, None, False),
        (2, None, False),
        (3, None, True),
        (1, "fail", True),
        (0, "fail", False),
        (199, "skip", False),
    ],
)
def test_bad_records_are_refused_or_skipped_as_asked(bad, on_error, refused):
    report = BuildReport(read=200, kept=200 - bad, bad=[BadRow(f"a.jsonl:{i}", "no answer") for i in range(bad)])
    if not refused:
        return check_bad_records(report, PreparePolicy(task="rm", on_error=on_error))
    with pytest.raises(DataError, match=rf"^{bad} of 200 records (?s:.*)\n  a\.jsonl:0: no answer") as caught:
        check_bad_records(report, PreparePolicy(task="rm", on_error=on_error))
    assert "`dstrain data check a.jsonl --task rm`" in str(caught.value)
    assert ("a.jsonl:9: " in str(caught.value)) == (bad >= 10)
    assert "a.jsonl:10: " not in str(caught.value)
    assert ("on_error: skip" in str(caught.value)) == (on_error != "skip")
    return None


@pytest.mark.parametrize("on_error", [None, "skip", "fail"])
def test_one_fault_of_all_records_is_told_once(on_error):
    """It is most often the model's or the recipe's, such as a chat template with an error: `data check` finds nothing."""
    bad = [BadRow(f"a.jsonl:{i}", f"its images take {i} tokens") for i in range(200)]
    with pytest.raises(DataError) as caught:
        check_bad_records(BuildReport(read=200, bad=bad), PreparePolicy(task="vlm", on_error=on_error))
    assert str(caught.value).splitlines() == [
        "200 of 200 records (100.0%) cannot be used, all for one reason:",
        "  a.jsonl:0: its images take 0 tokens",
        "if the records are right, the recipe or the model does not fit them",
    ]


def test_bad_records_are_shown_by_kind():
    rows = [BadRow(f"a.jsonl:{i}", f"image not found: {i}.png" if i % 2 else f"kind {'abc'[i % 3]}") for i in range(60)]
    told = format_bad_rows(rows)
    assert told[:10] == [f"a.jsonl:{i}: kind a" for i in range(0, 60, 6)]
    assert [line for line in told if "…" in line] == ["… and 20 more like a.jsonl:19"]
    assert len(format_bad_rows(rows, None, None)) == 60
    assert format_bad_rows(rows[:9]) == [f"{row.location}: {row.reason}" for row in rows[:9]]
    many = [BadRow("a.jsonl:1", "x" * (i + 1)) for i in range(30) for _ in range(11)]
    assert format_bad_rows(many)[-1] == "… and 220 more of 20 other kinds"
    assert len(format_bad_rows(many)) == 10 * 11 + 1


def test_another_verdict_needs_no_new_tokens(write_lines):
    source, built = open_source(write_lines([{"n": 0}, {"n": 1}])), []

    def counting(pairs):
        built.append(1)
        return encode(pairs)

    with pytest.raises(DataError, match=r"1 of 2 records \(50.0%\) cannot be used, above the 1% limit"):
        prepare(source, counting, {}, PreparePolicy(task="rm"))
    assert len(prepare(source, counting, {}, PreparePolicy(task="rm", on_error="skip"))) == 1
    assert built == [1]


def test_a_check_lists_every_bad_record_in_the_files_order(write_lines):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    path = write_lines(
        [good, {"prompt": "p", "chosen": "a"}, b"{", good, {"prompt": "p", "chosen": "", "rejected": "b"}]
    )
    assert [row.location for row in check_source(open_source(path), read_preference).bad] == [
        f"train.jsonl:{n}" for n in (2, 3, 5)
    ]


def test_the_fingerprint_follows_what_decides_the_ids(tokenizer):
    import copy

    first, other = tokenizer_fingerprint(tokenizer), copy.deepcopy(tokenizer)
    other(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(other) == first
    other.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(other) != first


def stored_columns(*examples: dict) -> list[dict]:
    chunk = [example | {"sample": at} for at, example in enumerate(examples)]
    return [*load_or_build_store({"n": repr(examples)}, lambda report: [chunk[:1], chunk[1:]])]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([0.3, 0.0, 0.2], np.float32), ([1, 2], np.int32), ([True, False], np.int32), ((0.5, 1), np.float32),
        (np.arange(3, dtype=np.uint8), np.int32), (np.array([0.5]), np.float32), ([float("nan"), 1.0], np.float32),
        ([np.float64(0.1), np.int64(3)], np.float32),
    ],
)  # fmt: skip
def test_a_list_comes_back_as_the_numbers_that_it_holds(value, kind):
    for row in stored_columns({"values": []}, {"values": value}, {"values": []}, {"values": value})[1::2]:
        assert row["values"].dtype == kind
        np.testing.assert_array_equal(row["values"], np.asarray(value, kind))


@pytest.mark.parametrize("value", [3, 0.25, True, np.int64(7), np.float32(0.5), 2**53 + 1, -(2**63), float("inf")])
def test_a_number_comes_back_as_it_was(value):
    for row in stored_columns({"label": value}, {"label": value}):
        assert row["label"] == value
        assert type(row["label"]) is (float if isinstance(value, float | np.floating) else int)


def test_integers_in_a_column_of_floats_are_floats():
    _, second = stored_columns({"x": 0.5, "ys": [0.5]}, {"x": 2, "ys": [1, 0]})
    assert (second["x"], second["ys"].tolist(), second["ys"].dtype) == (2.0, [1.0, 0.0], np.float32)


def test_a_column_of_empty_lists_is_one():
    assert [row["ids"].tolist() for row in stored_columns({"ids": []}, {"ids": []})] == [[], []]


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ([1], [0.5], "record 1 holds floats, and the values before it are integers"),
        (1, 0.5, "record 1 holds floats"),
        (1, [1], "record 1 is a list, and the examples before it have numbers"),
        ([1], 1, "record 1 is a number, and the examples before it have lists"),
        ("text", "", r"record 0 is a str; .*encode text as token ids or bytes, such as \[\*text.encode\(\)\]"),
        (["a", "b"], [], "record 0 is a list of str; a column holds numbers or flat lists of numbers"),
        ([[0.5, 1.0]], [], "record 0 is a list of list; .*: flatten it"),
        ([[1], [2, 3]], [], "record 0 is a list of list; .*: flatten it"),
        (np.zeros((2, 2)), [], "record 0 is an array of float64 with 2 dimensions"),
        (None, None, "record 0 is None"),
        ([1], [None], "record 1 is a list of NoneType"),
        ([1], [1, None], "record 1 is a list of int and NoneType"),
        ({"a": 1}, 0, "record 0 is a dict"),
        ([1], (n for n in [1]), "record 1 is a generator"),
        ([2**31], [], r"record 0 has 2147483648, and a list holds integers of 32 bits"),
        ([2**70], [], "record 0 has an integer that does not fit"),
        (2**63, 0, "record 0 has 9223372036854775808, and a number is an integer of 64 bits"),
        ([1e300], [], r"record 0 has 1e\+300, and a list holds floats of 32 bits"),
        ([1j], [], "record 0 is a list of complex"),
    ],
)  # fmt: skip
def test_a_value_that_would_change_is_refused_with_its_column_and_record(first, second, problem):
    with pytest.raises(TaskError, match=f"^column 'values' of {problem}"):
        stored_columns({"values": first}, {"values": second})


def test_examples_with_other_columns_are_refused():
    with pytest.raises(TaskError, match="column 'b' of record 1 is missing, and the examples before it have it; give"):
        stored_columns({"a": 1, "b": 2}, {"a": 1})
    with pytest.raises(TaskError, match="column 'b' of record 1 is new; give every example the same columns"):
        stored_columns({"a": 1}, {"a": 1, "b": 2})
    with pytest.raises(TaskError, match=r"column 'ids\.ends' of record 0 is the name of a file in the cache too"):
        stored_columns({"ids": [1], "ids.ends": 2})


def own_columns(tmp_path: Path, encode) -> list[dict]:
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(6)))
    policy = PreparePolicy(task="own.py")
    return [*prepare(open_source(tmp_path / "r.jsonl"), encode, {}, policy)]


def test_a_refused_value_names_task_column_and_place(tmp_path):
    with pytest.raises(TaskError, match=r"^task own.py: column 'x' of .*r.jsonl:4 holds floats"):
        own_columns(tmp_path, lambda rows: [{"x": [0.5 if record["n"] == 3 else 1]} for _, record in rows])


def test_an_encoder_may_not_name_a_column_as_the_index_of_its_record(tmp_path):
    with pytest.raises(
        TaskError, match=r"^task own.py: column 'sample' of .*r.jsonl:1 has the name of the record's index"
    ):
        own_columns(tmp_path, lambda rows: [{"sample": [1]} for _ in rows])


def test_an_encoder_that_loses_a_record_is_refused(tmp_path):
    with pytest.raises(TaskError, match="the task's encoder returned 5 results for 6 records"):
        own_columns(tmp_path, lambda rows: [{"n": record["n"]} for _, record in rows[1:]])


def test_a_column_that_ends_in_cut_is_a_column(tmp_path):
    assert own_columns(tmp_path, lambda rows: [{"hair_cut": record["n"]} for _, record in rows])[5]["hair_cut"] == 5


def test_only_named_columns_hold_tokens():
    rows = [{"ids": [1] * at, "letters": [7] * 90, "sample": at} for at in range(5)]
    key = {"token_columns": {"names": ["ids"]}}
    store = load_or_build_store(key, lambda report: [rows])
    assert store.max_lengths(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert (store.summarize(np.arange(5))["tokens"], store.summarize(np.arange(5))["longest"]) == (10, 4)
    plain = load_or_build_store({"n": 1}, lambda report: [rows])
    assert plain.sequence_lengths is None
    assert "tokens" not in plain.summarize(np.arange(5))


# The keys that tokens, tokenizers and outputs of frozen models are cached by.
#
# Names of classes, functions and fields of dstrain are in some keys. Where other examples come of the same data,
# CACHE_FORMAT is raised.


TEXT: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
EYES = {
    "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 8,
}  # fmt: skip
SEEING = {"model_type": "llava", "vision_feature_select_strategy": "default", "vision_feature_layer": -1}
TOKENIZER = {"train": "bpe", "vocab_size": 46, "alphabet": "data"}
PAIRS = [{"prompt": f"mend {number}?", "chosen": "open it", "rejected": "go away"} for number in range(4)]
CHATS = [{"messages": [{"role": "user", "content": f"mend {number}?"}, {"role": "assistant", "content": "open it"}]}
         for number in range(4)]  # fmt: skip
LABELLED = [{"prompt": f"mend {number}?", "completion": "open it", "label": number < 2} for number in range(4)]
SEEN = [{"messages": [{"role": "user", "content": "<image>which colour?"}, {"role": "assistant", "content": name}],
         "images": [f"{name}.png"]} for name in ("red", "blue")]  # fmt: skip


def write(folder: Path, task: str, records: list[dict[str, Any]], **values: Any) -> str:
    """Writes a recipe and its data; its path."""
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = {
        "task": task,
        "model": {"config": TEXT, "tokenizer": TOKENIZER},
        "data": {"train": "train.jsonl", "max_length": 32},
        "batch": {"total": 2, "micro": 1},
        "steps": 1,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | values))
    return str(folder / "recipe.yaml")


def see(folder: Path, **values: Any) -> str:
    """The same for a model that sees, with the images that the records name."""
    for name in ("red", "blue"):
        Image.new("RGB", (16, 16), name).save(folder / f"{name}.png")
    config = {**SEEING, "text_config": TEXT, "vision_config": EYES}
    return write(folder, "vlm", SEEN, model={"config": config, "tokenizer": TOKENIZER, **values})


def run_prepare(recipe: str) -> None:
    result = invoke("prepare", recipe)
    assert result.exit_code == 0, result.output


def hashed(key: Any) -> str:
    """The name of a key, by a way of its own."""
    text = json.dumps(key, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def only_key(cache: Path) -> dict[str, Any]:
    """The key of the one store in a cache; the folder has its name."""
    (path,) = cache.glob("tokens/*/MANIFEST.json")
    key = json.loads(path.read_text(encoding="utf-8"))["key"]
    assert path.parent.name == hashed(key)
    return key


RENDERING_KEY = {
    "format": 9, "libraries": read_minor_versions("jinja2", "tokenizers", "transformers"), "rendered": "auto",
}  # fmt: skip
"""What all of them depend on: the libraries that render and tokenize, and data.rendered."""
PAIRS_KEY = {
    **RENDERING_KEY, "data": "48efa561d15aed39009e68da46d5b591b73b8e40729e040f4d8d0c23cd95393c", "what": "preferences",
    "max_length": 32, "max_prompt_length": None, "group": "task",
    "token_columns": {"names": ["chosen", "rejected"], "is_pair": True, "prefix": "prompt_length"},
}  # fmt: skip
CHATS_KEY = {
    **RENDERING_KEY, "data": "d2ac24821988f6bb2db952ca06ee702628c8439c100d1caecee640cda13013d8", "what": "conversations",
    "max_length": 32, "max_prompt_length": None, "assistant_only": True, "with_thinking": True, "group": "task",
    "token_columns": {"names": ["input_ids"], "is_pair": False, "prefix": None},
}  # fmt: skip
LABELLED_KEY = {
    **RENDERING_KEY, "data": "1020bd43564076bc1cc31df90701a0fefde7eac20f86039e1bac6ecb4debc9ba", "what": "labelled",
    "mismatched": True, "max_length": 32, "max_prompt_length": None, "assistant_only": True, "with_thinking": True, "group": "task",
    "token_columns": {"names": ["answer", "mismatched"], "is_pair": False, "prefix": None},
}  # fmt: skip
SEEN_KEY = CHATS_KEY | {"data": "536bba1e37e8ba3486dbaf909af371314f207249432f4e32b7237a86af19ad26"}

TEXTS = {
    "rm": (PAIRS, PAIRS_KEY),
    "dpo": (PAIRS, PAIRS_KEY),
    "sft": (CHATS, CHATS_KEY),
    "kto": (LABELLED, LABELLED_KEY),
}
"""Task -> records, and what its key says but for the tokenizer."""


@pytest.mark.parametrize("task", TEXTS)
def test_tokens_are_cached_by_data_and_settings(task: str, tmp_path: Path, fresh_cache: Path) -> None:
    records, wanted = TEXTS[task]
    for _ in range(2):
        run_prepare(write(tmp_path, task, records))
        assert {name: value for name, value in only_key(fresh_cache).items() if name != "tokenizer"} == wanted
        assert len([*(fresh_cache / "tokenizers").iterdir()]) == 1


def test_tokens_with_images_are_cached_by_processor_and_folder(tmp_path: Path, fresh_cache: Path) -> None:
    for _ in range(2):
        run_prepare(see(tmp_path))
        key = only_key(fresh_cache)
        assert key["folders"] == [str(tmp_path)]
        assert {name: value for name, value in key.items() if name not in ("processor", "folders")} == SEEN_KEY
        assert len([*(fresh_cache / "tokenizers").iterdir()]) == 1


def test_statistics_of_images_are_cached_by_their_paths_sizes_and_times(tmp_path: Path, fresh_cache: Path) -> None:
    run_prepare(see(tmp_path, processor={"normalize": "data"}))
    states = [((tmp_path / f"{name}.png"), (tmp_path / f"{name}.png").stat()) for name in ("red", "blue")]
    images = [f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    (found,) = (fresh_cache / "image_statistics").iterdir()
    assert found.name == hashed({"images": images, "most": 10_000, "format": 2})


def test_outputs_of_a_reference_are_cached_by_tokens_and_weights(tmp_path: Path, fresh_cache: Path) -> None:
    save_base(str(tmp_path / "policy"), tiny_recipe("dpo", tmp_path))
    run_prepare(write(tmp_path, "dpo", PAIRS, model={"path": str(tmp_path / "policy")},
                  options={"precompute_ref_log_probs": True}))  # fmt: skip
    tokens = only_key(fresh_cache)
    (path,) = (fresh_cache / "references").glob("*/MANIFEST.json")
    key = json.loads(path.read_text(encoding="utf-8"))["key"]
    assert path.parent.name == hashed(key)
    assert sorted(file.name for file in path.parent.glob("*.npy")) == ["ref_chosen_logps.npy", "ref_rejected_logps.npy"]
    assert {name: value for name, value in key.items() if name not in ("weights", "digest")} == {
        "what": "reference", "version": 2, "task": "dpo", "tokens": hashed(tokens), "images": None, "quantize": None, "dtype": "float32",
        "attention": "auto", "drawn_in_shards": False, "first_row": 0, "rows": 4,
    }  # fmt: skip
