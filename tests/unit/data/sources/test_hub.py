"""Datasets from the hub, read from a hub of the tests' own by processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dstrain.data.sources.hub import HubSplit, is_hub_name, parse_hub_split
from dstrain.data.sources.open import open_source
from dstrain.errors import DataError
from tests.unit.data.sources.hub_server import Hub, serve

pytest.importorskip("datasets")

READ = """
import json, sys
from dstrain.data.sources.open import open_source
from dstrain.errors import DataError
for what, columns in json.loads(sys.argv[1]):
    try:
        source = open_source(what, columns)
        said = {"rows": [source[at] for at in range(len(source))], "where": source.location(2), "digest": source.digest}
    except DataError as fault:
        said = {"error": str(fault)}
    print(json.dumps(said))
print(json.dumps("torch" in sys.modules))
"""


def lines(count: int) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows(count))


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{at}?", "chosen": f"yes {at}", "rejected": f"no {at}"} for at in range(count)]


def table(count: int) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.BufferOutputStream()
    said = [{"conversations": [{"from": "human", "value": row["prompt"]}], "chosen": row["chosen"], "bad": row["rejected"]} for row in rows(count)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(said), file)
    return file.getvalue().to_pybytes()


TWO = b"---\nconfigs:\n- config_name: easy\n  data_files: easy.jsonl\n- config_name: hard\n  data_files: hard.jsonl\n---\n"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    sets = {
        "org/pairs": {"README.md": b"# Pairs\n", "data/train.jsonl": lines(9), "data/test.jsonl": lines(4)},
        "org/table": {"data/train-00000-of-00001.parquet": table(5)},
        "org/two": {"README.md": TWO, "easy.jsonl": lines(3), "hard.jsonl": lines(6)},
        "org/script": {"script.py": b"raise SystemExit('the dataset ran its own Python')"},
    }
    with serve(Hub(sets, gated=("org/gated",))) as found:
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    """Of what the hub's libraries read, HF_HOME, HF_ENDPOINT and what is named."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "*", **more}


def start(home: Path, endpoint: str, wanted: list[Any], **more: str) -> subprocess.Popen[str]:
    """A process that reads what is wanted."""
    pairs = [item if isinstance(item, list) else [item, {}] for item in wanted]
    command = [sys.executable, "-c", READ, json.dumps(pairs)]
    return subprocess.Popen(
        command, env=environment(home, endpoint, **more), cwd=home, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    *said, torch = map(json.loads, out.splitlines())
    assert torch is False
    return said


@pytest.fixture(scope="module")
def said(hub: Hub, home: Path) -> dict[str, dict[str, Any]]:
    """What came of reading each dataset for the first time."""
    columns = {"bad": "rejected"}
    wanted = ["org/pairs", "org/pairs:test", "org/pairs:dev", "org/none", "org/gated", "org/two", "org/two:train:hard"]
    wanted += ["org/two:train:harder", "org/script", ["org/table", columns], ["org/pairs", {"prompd": "question"}]]
    found = finish(start(home, hub.endpoint, wanted))
    return {str(what): one for what, one in zip(wanted, found, strict=True)}


@pytest.mark.slow
def test_rows_come_from_the_endpoint_that_is_named(said: dict[str, Any], hub: Hub) -> None:
    assert said["org/pairs"]["rows"] == rows(9)
    assert said["org/pairs:test"]["rows"] == rows(4)
    assert [said[name]["where"] for name in ("org/pairs", "org/pairs:test")] == ["org/pairs[2]", "org/pairs:test[2]"]
    assert "/api/datasets/org/pairs" in hub.asked
    assert f"/datasets/org/pairs/resolve/{hub.revision}/data/train.jsonl" in hub.asked


def test_a_configuration_is_read_by_its_name(said: dict[str, Any]) -> None:
    assert said["org/two:train:hard"]["rows"] == rows(6)
    assert said["org/two:train:hard"]["where"] == "org/two:train:hard[2]"
    for name in ("org/two", "org/two:train:harder"):
        assert all(word in said[name]["error"] for word in ("'easy', 'hard'", "name: ONE_OF_THEM"))


def test_columns_are_renamed_as_in_files(said: dict[str, Any]) -> None:
    first = said["['org/table', {'bad': 'rejected'}]"]["rows"][0]
    assert first == {"conversations": [{"from": "human", "value": "0?"}], "chosen": "yes 0", "rejected": "no 0"}
    error = said["['org/pairs', {'prompd': 'question'}]"]["error"]
    assert error == "data.columns.prompd: no record of org/pairs has the column 'prompd'; did you mean 'prompt'?"


def test_digests_tell_splits_apart(said: dict[str, Any]) -> None:
    assert len({one["digest"] for one in said.values() if "digest" in one}) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/pairs:dev", ["has no split 'dev'; it has train, test"]),
        ("org/none", ["is neither a local file nor a dataset on http://127.0.0.1", "set HF_TOKEN if it is private"]),
        ("org/gated", ["is a gated dataset", "/datasets/org/gated and set HF_TOKEN"]),
        ("org/script", ["a Python script of its own, which is never run", "a copy in parquet or jsonl"]),
    ],
)
def test_what_cannot_be_had_is_said_with_a_mend(name: str, words: list[str], said: dict[str, Any]) -> None:
    for word in words:
        assert word in said[name]["error"]


@pytest.mark.slow
def test_what_was_read_once_is_read_again_without_the_hub(said: dict[str, Any], home: Path) -> None:
    wanted, nobody = ["org/pairs", "org/pairs:test", "org/none"], "http://127.0.0.1:9"
    started = [start(home, nobody, wanted, **{name: "1"}) for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")]
    for process in started:
        train, test, none = finish(process)
        assert (train, test) == (said["org/pairs"], said["org/pairs:test"])
        assert "the hub is switched off" in none["error"]
        assert "read it once with the hub switched on, or name a file" in none["error"]


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_told_at_once(said: dict[str, Any], home: Path) -> None:
    """Also where the cache has the dataset: what is stale is taken only by those who ask for it."""
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        refused = start(home, "http://127.0.0.1:9", ["org/pairs"])
        hanging = start(home, f"http://127.0.0.1:{silent.getsockname()[1]}", ["org/pairs"], HF_HUB_ETAG_TIMEOUT="1")
        for process in (refused, hanging):
            error = finish(process)[0]["error"]
            for word in ("the hub http://127.0.0.1", "cannot be reached", "HF_ENDPOINT", "HF_DATASETS_OFFLINE=1"):
                assert word in error
        assert time.monotonic() - began < 30


@pytest.mark.slow  # one at a time: above
def test_processes_that_read_at_the_same_time_read_the_same(said: dict[str, Any], hub: Hub, tmp_path: Path) -> None:
    started = [start(tmp_path, hub.endpoint, ["org/pairs", "org/pairs:test"]) for _ in range(2)]
    for process in started:
        assert finish(process) == [said["org/pairs"], said["org/pairs:test"]]


@pytest.mark.slow
def test_another_revision_has_another_digest(said: dict[str, Any], hub: Hub, home: Path) -> None:
    hub.revision = "b" * 40
    try:
        found = finish(start(home, hub.endpoint, ["org/pairs"]))[0]
    finally:
        hub.revision = "a" * 40
    assert found["rows"] == said["org/pairs"]["rows"]
    assert found["digest"] != said["org/pairs"]["digest"]


@pytest.mark.slow
def test_a_check_of_a_hub_dataset_ends_with_2_where_it_cannot_be_had(tmp_path: Path) -> None:
    told = environment(tmp_path, "http://127.0.0.1:9")
    command = [sys.executable, "-m", "dstrain", "data", "check", "org/pairs", "--task", "rm"]
    done = subprocess.run(command, env=told, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: org/pairs is not a local file, and the hub http://127.0.0.1:9 cannot be reached"
    )


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'org/pairs is not a local file, .*; run pip install "dstrain\[hub\]"'):
        open_source("org/pairs")


@pytest.mark.parametrize(
    "name", ["org/name", "Anthropic/hh-rlhf", "a/b.c", "o/ds-v1.0", "HuggingFaceH4/ultrafeedback_binarized"]
)
def test_a_name_of_two_parts_is_one_of_the_hub(name: str) -> None:
    assert is_hub_name(name)
    for part in (
        HubSplit(name),
        HubSplit(name, "test"),
        HubSplit(name, "train", "main"),
        HubSplit(name, "test", "a:b"),
    ):
        assert parse_hub_split(str(part)) == part


@pytest.mark.parametrize(
    "name",
    ["pairs", "a/b/c", "./a", "../a", "/a/b", "~/a", "a/", "a/b.jsonl", "a/b.json.gz", "a/b.csv", "a b/c", "a/..", "", "é/b", "a/b\n", "a/" + "b" * 300],
)  # fmt: skip
def test_other_names_are_files(name: str) -> None:
    assert not is_hub_name(name)
    assert parse_hub_split(name) is None
    with pytest.raises(DataError):
        open_source(name)
