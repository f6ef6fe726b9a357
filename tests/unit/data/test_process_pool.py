"""Several processes make the very stores that one makes, end with an error that says why, and leave nobody behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain.data import prepare
from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.preferences import UnpairedEncode, encode_preferences
from dstrain.data.encoding.rendering import CUT_COLUMNS, EncodingConfig
from dstrain.data.formats.conversations import read_conversation
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.prepare import ExampleSettings, PreparePolicy, RecordEncode
from dstrain.data.records import Encode
from dstrain.data.sources.open import open_source
from dstrain.errors import BadRecord, DataError, RunError, TaskError, describe_unexpected
from tests.chat_templates import EARLIER, QUESTION, chat
from tests.vocabulary import message, wait_until

SETTINGS = EncodingConfig(max_length=60)
COUNTED = ExampleSettings(counted=CUT_COLUMNS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few records are shared by several processes."""
    monkeypatch.setattr(prepare, "MIN_PARALLEL_RECORDS", 1)
    monkeypatch.setattr(prepare, "PARALLEL_CHUNK_SIZE", 3)
    monkeypatch.setattr(prepare, "CHUNK_SIZE", 7)


def record(at: int) -> dict[str, Any]:
    if at % 11 == 5:
        return {"prompt": [QUESTION], "chosen": "", "rejected": "b", "label": True}
    prompt = [*EARLIER * (at % 4), message("user", f"where is fox {at // 3 if at > 20 else 0}?")]
    both = {"chosen": f"over river {at}", "rejected": "no fox " * (at % 17)}
    return {"prompt": prompt, "completion": [message("assistant", both["chosen"])], "label": at % 2 == 0} | (
        both if at % 17 else {"chosen": both["chosen"], "rejected": "dog"}
    )


def encoders() -> dict[str, Encode]:
    tokenizer = chat("zephyr", "metaspace")
    return {
        "pairs": RecordEncode(read_preference, lambda items: encode_preferences(tokenizer, items, 60)),
        "conversations": RecordEncode(
            read_conversation, lambda items: encode_conversations(tokenizer, items, SETTINGS)
        ),
        "labelled": UnpairedEncode(tokenizer, SETTINGS, read_unpaired),
    }


def written(folder: Path, count: int = 60) -> Path:
    lines = [json.dumps(record(at)) for at in range(count)]
    lines[9] = "no json"
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder / "train.jsonl"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", ["pairs", "conversations", "labelled"])
def test_stores_are_equal_to_the_byte(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(written(tmp_path))
    found = []
    for name, processes in (("one", 1), ("three", 3)):
        monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / name))
        policy = PreparePolicy(task="rm", on_error="skip", processes=processes)
        store = prepare.prepare(source, encoders()[kind], {"what": kind}, policy, COUNTED)
        found.append((files(store.folder), store.report))
    assert found[0][1] == found[1][1]
    assert found[0][1].bad[0].location.endswith("train.jsonl:10")
    assert len(found[0][1].bad) > 4
    assert found[0][1].cuts["prompt_cut"] > 0
    assert found[0][0] == found[1][0]


def encode_all(source: Any, encode: Encode, processes: int = 3) -> list[Any]:
    chunks = prepare.iter_encoded(source, encode, prepare.BuildReport(), 7, processes, COUNTED)
    return [row for chunk in chunks for row in chunk]


def test_a_file_whose_records_are_all_bad_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n" * 20)
    source, report = open_source(tmp_path / "x.jsonl"), prepare.BuildReport()
    none = lambda rows: [BadRecord("odd") for _ in rows]  # noqa: E731
    assert [*prepare.iter_encoded(source, none, report, 7, 3)] == [[]] * 7
    assert [row.location[-2:] for row in report.bad] == [f"{at:>2}".replace(" ", ":") for at in range(1, 21)]


def test_an_error_of_an_encoder_is_raised_as_it_is(tmp_path: Path) -> None:
    def refuse(rows: list[tuple[int, Any]]) -> list[Any]:
        if rows[0][0] >= 9:
            raise DataError("data.max_length 1 leaves no room")
        return [{"ids": [index]} for index, _ in rows]

    before = psutil.Process().children()
    with pytest.raises(DataError, match="leaves no room"):
        encode_all(open_source(written(tmp_path)), refuse)
    assert not {*psutil.Process().children()} - {*before}


@pytest.mark.parametrize(("how", "said_so"), [("kill", "SIGKILL"), ("exit", "exit code 7")])
def test_a_process_that_is_ended_is_named_and_nothing_hangs(how: str, said_so: str, tmp_path: Path) -> None:
    def ending(rows: list[tuple[int, Any]]) -> list[Any]:
        if rows[0][0] == 12 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rows[0][0] == 12:
            os._exit(7)
        time.sleep(0.02)
        return [{"ids": [index]} for index, _ in rows]

    began = time.monotonic()
    with pytest.raises(
        RunError, match=rf"process \d+, one of 3 that encode records, was killed \({said_so}\); if memory"
    ):
        encode_all(open_source(written(tmp_path)), ending)
    assert time.monotonic() - began < 10


def test_an_error_that_cannot_be_sent_is_told(tmp_path: Path) -> None:
    def odd(rows: list[tuple[int, Any]]) -> list[Any]:
        raise ValueError(lambda: None)

    with pytest.raises(RuntimeError, match=r"(?s)ValueError\(<function .*Traceback .*in odd"):
        encode_all(open_source(written(tmp_path)), odd)


def test_a_process_that_is_killed_while_it_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_half(self: Connection, content: bytes, write: Any = None) -> None:
        os.write(self.fileno(), bytes(content[: len(content) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Connection, "_send", send_half)
    with pytest.raises(RunError, match="SIGKILL"):
        encode_all(open_source(written(tmp_path)), lambda rows: [{"ids": [index] * 100_000} for index, _ in rows])


def test_what_is_not_read_to_its_end_leaves_no_process(tmp_path: Path) -> None:
    def slow(rows: list[tuple[int, Any]]) -> list[Any]:
        time.sleep(0.02 if rows[0][0] < 6 else 60)
        return [{"ids": [index]} for index, _ in rows]

    chunks = prepare.iter_encoded(open_source(written(tmp_path)), slow, prepare.BuildReport(), 7, 3)
    before = psutil.Process().children()
    next(chunks)
    children = [child for child in psutil.Process().children() if child not in before]
    assert len(children) == 3
    chunks.close()  # type: ignore[attr-defined]  # a generator, though it says Iterator
    assert psutil.wait_procs(children, 10)[1] == []


def test_few_records_and_one_core_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(written(tmp_path))
    mine = lambda rows: [{"ids": [os.getpid()]} for _ in rows]  # noqa: E731
    assert {row["ids"][0] for row in encode_all(source, mine, 1)} == {os.getpid()}
    assert os.getpid() not in {row["ids"][0] for row in encode_all(source, mine)}
    monkeypatch.setattr(prepare, "MIN_PARALLEL_RECORDS", len(source) + 1)
    assert {row["ids"][0] for row in encode_all(source, mine)} == {os.getpid()}


CHILD = """
import sys, time
from pathlib import Path
from dstrain.data import prepare, process_pool
from dstrain.data.sources.open import open_source
prepare.MIN_PARALLEL_RECORDS = 1
prepare.PARALLEL_CHUNK_SIZE = 3
def slow(rows):
    with (Path(sys.argv[1]).parent / "began").open("a") as file:
        file.write("x")
    time.sleep(60)
policy = prepare.PreparePolicy(task="rm", processes=3)
prepare.prepare(open_source(sys.argv[1]), slow, {}, policy)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_processes_end_with_their_parent(sign: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(written(tmp_path))]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: (tmp_path / "began").exists() and len((tmp_path / "began").read_text()) >= 3)
    children = psutil.Process(parent.pid).children()
    assert len(children) == 3
    if sign == signal.SIGINT:
        os.killpg(parent.pid, sign)  # as a terminal does
    else:
        parent.send_signal(sign)
    _, said_so = parent.communicate(timeout=60)
    assert parent.returncode == -sign
    assert psutil.wait_procs(children, 10)[1] == []
    assert said_so.count("KeyboardInterrupt") == (sign == signal.SIGINT), "one traceback, the parent's"


@pytest.mark.parametrize("group", [None, lambda record: record["n"] // 3])
def test_floats_integers_and_empty_lists_are_the_same_from_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(40)))

    def encode(rows: list[tuple[int, dict[str, Any]]]) -> list[Any]:
        values = [[], [0.25], [1, 2], [0.5, 1]]
        return [{"y": values[r["n"] % 4], "x": r["n"] or 0.5, "ids": [r["n"]] * (r["n"] % 3)} for _, r in rows]

    stores = []
    for name, processes in (("one", 1), ("three", 3)):
        monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / name))
        policy = PreparePolicy(task="own", processes=processes)
        settings = ExampleSettings(get_group=group)
        stores.append(prepare.prepare(open_source(tmp_path / "r.jsonl"), encode, {}, policy, settings))
    one, three = ({f.name: f.read_bytes() for f in store.folder.glob("*.npy")} for store in stores)
    assert one == three
    assert ("sample.group.npy" in one) == (group is not None)


def test_an_error_of_the_encoder_names_its_line_from_another_process_too(tmp_path: Path) -> None:
    def broken(rows: list[tuple[int, dict[str, Any]]]) -> list[Any]:
        return [1 / 0 for _ in rows]

    (tmp_path / "r.jsonl").write_text('{"n": 1}\n' * 40)
    policy = PreparePolicy(task="own.py", processes=3)
    with pytest.raises(ZeroDivisionError) as caught:
        prepare.prepare(open_source(tmp_path / "r.jsonl"), broken, {}, policy)
    line = broken.__code__.co_firstlineno + 1
    assert describe_unexpected(caught.value).endswith(f", tests/unit/data/test_process_pool.py:{line})")


def test_a_refused_value_is_named_from_another_process_too(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(40)))
    policy = PreparePolicy(task="own.py", processes=3)
    with pytest.raises(TaskError, match=r"^task own.py: column 'x' of .*r.jsonl:31 is a str; a column holds numbers"):
        prepare.prepare(
            open_source(tmp_path / "r.jsonl"),
            lambda rows: [{"x": "a" if record["n"] == 30 else 1} for _, record in rows],
            {},
            policy,
        )
