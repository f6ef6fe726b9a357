"""What nobody thought of: any input is read, or refused with a sentence, and nothing else happens.

What this found stands as a test of its own where the mended code is tested.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import dump_recipe, read_recipe
from dstrain.config.schema import RunConfig
from dstrain.data.formats.messages import ROLE_ALIASES, parse_transcript
from dstrain.data.formats.preferences import Preference, read_preference
from dstrain.data.sources.open import open_source
from dstrain.ds_config import Device, RunSettings, complete_preset, resolve_precision
from dstrain.errors import BadRecord, DataError, PresetError, RecipeError, UsageError
from dstrain.preset import Preset, convert_preset, read_preset
from dstrain.preset.keys import LEARNING_KEYS, load_key_schema
from dstrain.resources import find_resource_dir

Error = TypeVar("Error", bound=Exception)
Result = TypeVar("Result")

FEW = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=400)


def attempt(kind: type[Error], call: Callable[[], Result]) -> tuple[Result | None, Error | None]:
    """(what the call gave, None), or (None, the error of this kind that it raised)."""
    try:
        return call(), None
    except kind as error:
        return None, error


TEXT = st.text(max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT


def nested(names: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values in lists and mappings, whose keys are `names`."""
    return st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
    )


JSON = nested(TEXT)
ANYTHING = nested(TEXT | st.none() | st.booleans() | st.integers())
YAML = st.text(alphabet=":-[]{},&*!|>'\"#%@`? \n\tab01.~=<", max_size=40)


def keys_of(model: Any, above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if hasattr(part, "model_fields"):
                yield from keys_of(part, f"{above}{name}.")


KEYS = sorted(keys_of(RunConfig))
NEAR = st.sampled_from(KEYS) | st.sampled_from(KEYS).map(lambda key: key[:-1]) | TEXT
WORDS = st.sampled_from(
    ["null", "true", ".inf", ".nan", "-1", "0", "1e400", "auto", "rm", "[]", "{}", "a.jsonl", "org/name", "~", "2020-01-01"]
)  # fmt: skip


def check_sentences(error: UsageError | None, *names: str) -> None:
    """Each fault is one line that has a place, what is true and what to do."""
    if error is None:
        return
    assert len(str(error).splitlines()) == max(len(error.faults), 1), error
    for fault in error.faults:
        assert all(part.strip() for part in (fault.where, fault.problem, fault.fix)), error
    if not error.faults:
        assert "; " in str(error), error
    for name in names:
        assert name in str(error), error


@pytest.mark.slow
@FEW
@given(st.dictionaries(st.sampled_from([*RunConfig.model_fields]) | TEXT, ANYTHING, max_size=4))
def test_any_mapping_is_a_recipe_or_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe, error = attempt(RecipeError, lambda: read_recipe(path))
    check_sentences(error, "r.yaml")
    assert recipe is None or yaml.safe_load(dump_recipe(recipe.config))["task"]


@FEW
@given(st.sampled_from(KEYS), ANYTHING)
def test_any_value_of_any_key_is_taken_or_refused_by_its_name(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "r.yaml"
    for name in reversed(key.split(".")):
        value = {name: value}
    path.write_text(yaml.safe_dump({"task": "rm", **value}), encoding="utf-8")
    _, error = attempt(RecipeError, lambda: read_recipe(path))
    check_sentences(error, "r.yaml", key.split(".")[0])


@FEW
@given(YAML | st.text(max_size=40) | st.binary(max_size=40))
def test_any_text_is_a_recipe_or_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    _, error = attempt(RecipeError, lambda: read_recipe(path, task="rm"))
    check_sentences(error, "r.yaml")


@FEW
@given(st.lists(st.builds("{}={}".format, NEAR, WORDS | TEXT | ANYTHING.map(repr)) | TEXT, max_size=3))
def test_any_set_is_taken_or_refused(sets: list[str]) -> None:
    _, error = attempt(RecipeError, lambda: read_recipe(None, sets, "rm"))
    check_sentences(error)
    assert error is None or "--set" in str(error) or "--task" in str(error)


PATH_KEYS = st.sampled_from(
    ["data.train", "data.eval", "model.path", "model.tokenizer", "model.init", "task", "ds_config"]
)
PATHS = st.sampled_from(["~", "~nobody/x", "/", "..", "a/b", "x" * 300, "a/" * 3000, "org/name", "\0", "."])


@FEW
@given(PATH_KEYS, TEXT | PATHS)
def test_any_path_is_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    wish = TrainRequest(task="rm", overrides=[f"{key}={json.dumps(path)}"])
    check_sentences(attempt(UsageError, lambda: resolve_recipe(wish))[1])


MESSAGE = st.builds(
    lambda names, role, content: dict(zip(names, (role, content), strict=True)),
    st.sampled_from([("role", "content"), ("from", "value")]),
    st.sampled_from([*ROLE_ALIASES, "alien"]),
    TEXT | JSON,
)
DIALOG = st.lists(st.sampled_from(["\n\nHuman:", "\n\nAssistant:", " a", " b", "\n", ""]), max_size=6).map("".join)
TURNS = st.lists(MESSAGE, max_size=3)
ANSWER = TEXT | DIALOG | MESSAGE | TURNS | JSON
PAIRS = st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=2)
RECORD = st.fixed_dictionaries(
    {},
    optional={
        "chosen": ANSWER, "rejected": ANSWER, "output": st.lists(ANSWER, max_size=3) | ANSWER, "prompt": ANSWER,
        "conversations": TURNS | JSON, "messages": TURNS | JSON, "instruction": TEXT | JSON, "input": TEXT | JSON,
        "history": PAIRS | JSON, "system": TEXT | JSON, "tools": JSON | JSON.map(json.dumps), "margin": JSON,
        "label": JSON, "images": JSON, "image": JSON,
    },
)  # fmt: skip


@pytest.mark.slow
@MANY
@given(st.dictionaries(TEXT, JSON, max_size=4) | RECORD)
def test_any_record_is_a_preference_or_bad(record: dict[str, Any]) -> None:
    before = json.dumps(record)
    found, fault = attempt(BadRecord, lambda: read_preference(record))
    assert json.dumps(record) == before
    if fault is not None:
        assert "; " in fault.reason, fault
        assert fault.reason.isprintable(), fault
        return
    assert isinstance(found, Preference)
    for answer in (found.chosen, found.rejected):
        assert (answer if isinstance(answer, str) else answer[-1]["content"]).strip()
    assert isinstance(found.prompt, str) or found.prompt[-1]["role"] in ("user", "tool")


@MANY
@given(DIALOG | st.text())
def test_a_dialog_that_is_read_and_written_is_the_same(text: str) -> None:
    turns = parse_transcript(text)
    assert "".join(turn.prefix + turn.text for turn in turns) == text
    assert all(left.role != right.role for left, right in pairwise(turns))


def read_all(path: Path) -> str:
    """The message of the refusal; '' if every record of the file was read."""
    source, error = attempt(DataError, lambda: open_source(path))
    if error is not None:
        return str(error)
    assert source is not None
    assert source.bad_rows or len(source)
    for index in range(len(source)):
        assert isinstance(source[index], dict)
        assert path.name in source.location(index)
    return ""


def is_read_or_refused(path: Path) -> bool:
    """Whether every record was read, or the refusal names the file and, after a semicolon, what to do."""
    message = read_all(path)
    return not message or (path.name in message and "; " in message)


LINES = st.lists(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=12), max_size=4).map(b"\n".join)
ENDINGS = st.sampled_from([".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz", ".csv", ""])


@FEW
@given(ENDINGS, st.binary(max_size=60) | LINES)
def test_any_bytes_are_records_or_refused(tmp_path: Path, ending: str, content: bytes) -> None:
    (tmp_path / f"data{ending}").write_bytes(content)
    assert is_read_or_refused(tmp_path / f"data{ending}")


@cache
def whole_files() -> dict[str, bytes]:
    """A file of each kind, whole."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"é{number}", "chosen": [{"role": "user", "content": "a"}]} for number in range(5)]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    file = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    parquet = file.getvalue().to_pybytes()
    return {".jsonl": lines, ".json": json.dumps(rows).encode(), ".parquet": parquet, ".jsonl.gz": gzip.compress(lines)}


@FEW
@given(
    st.sampled_from([".jsonl", ".json", ".parquet", ".jsonl.gz"]),
    st.integers(0, 2**16),
    st.integers(0, 255),
    st.booleans(),
)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, ending: str, at: int, byte: int, cut: bool) -> None:
    whole = whole_files()[ending]
    at %= len(whole)
    (tmp_path / f"data{ending}").write_bytes(whole[:at] if cut else whole[:at] + bytes([byte]) + whole[at + 1 :])
    assert is_read_or_refused(tmp_path / f"data{ending}")


SHIPPED = [json.loads(path.read_text()) for path in sorted(find_resource_dir("ds_configs").glob("*.json"))]
PLACES = [(name,) for name in load_key_schema()["keys"]]
PLACES += [(name, inner) for name, key in load_key_schema()["keys"].items() for inner in key.get("keys", {})]
PLACES += [
    (*name.split("."), *inner) for name in LEARNING_KEYS for inner in ((), ("type",), ("params",), ("params", "lr"))
]


@FEW
@given(JSON.map(json.dumps) | st.text(max_size=40) | st.binary(max_size=40))
def test_any_json_is_a_preset_or_refused(tmp_path: Path, text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    (tmp_path / "ds.json").write_bytes(content)
    assert all(map(names_place_and_fix, read_and_complete(tmp_path / "ds.json")))


@MANY
@given(st.sampled_from(SHIPPED), st.sampled_from(PLACES), JSON | st.just("auto") | st.integers(-1, 4))
def test_any_value_in_a_preset_is_taken_or_refused(
    tmp_path: Path, shape: dict[str, Any], path: tuple[str, ...], value: Any
) -> None:
    block = json.loads(json.dumps(shape))
    *above, name = path
    place = block
    for outer in above:
        place = place.setdefault(outer, {}) if isinstance(place.get(outer, {}), dict) else {}
    place[name] = value
    (tmp_path / "ds.json").write_text(json.dumps(block))
    assert all(map(names_place_and_fix, read_and_complete(tmp_path / "ds.json")))


def names_place_and_fix(fault: Any) -> bool:
    return "ds.json" in fault.where and bool(fault.problem.strip()) and bool(fault.fix.strip())


def read_and_complete(path: Path) -> Sequence[Any]:
    """The faults of the refusal; none if the JSON was converted, read and completed."""
    with suppress(PresetError):
        assert isinstance(json.loads(convert_preset(path).json_text), dict)
    preset, error = attempt(PresetError, lambda: read_preset(str(path)))
    if error is not None:
        assert error.faults
        return error.faults
    assert isinstance(preset, Preset)
    assert preset.stage in range(4)
    for wanted in ("auto", "bf16"):
        with suppress(PresetError):
            precision = resolve_precision(preset, wanted, Device("cuda", True))
            run = RunSettings(precision=precision, micro=1, accumulate=1, world_size=2, clip=1.0)
            made = complete_preset(preset, settings=run)
            assert made["train_batch_size"] == 2
            json.dumps(made, allow_nan=False)
    return ()
