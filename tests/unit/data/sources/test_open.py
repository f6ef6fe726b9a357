from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.trained_model import make_eval_source
from dstrain.config.schema import DatasetConfig
from dstrain.data.sources.base import ConcatSource, HeadSource, check_columns_exist
from dstrain.data.sources.open import FolderSource, open_source
from dstrain.errors import DataError, UsageError


def test_records_and_lines_are_found_past_blank_lines_windows_ends_and_a_byte_order_mark(write_lines):
    path = write_lines([b'\xef\xbb\xbf{"a": 1}\r', b"", b"  \r", '{"a": "é"}'.encode(), b'{"a": 3}'])
    source = open_source(path)
    assert [source[i]["a"] for i in range(len(source))] == [1, "é", 3]
    assert [source.location(i) for i in range(3)] == ["train.jsonl:1", "train.jsonl:4", "train.jsonl:5"]
    assert source.bad_rows == []
    assert source.get_base_dir(0) == source.base_dir == Path()


def test_the_last_line_needs_no_line_break(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}')
    assert open_source(tmp_path / "x.jsonl")[1] == {"a": 2}


def test_lines_that_are_no_record_are_named_and_not_counted(write_lines):
    rows = [
        {"a": 1},
        b'{"a": ',
        b"[1]",
        b'{"a": "\xff"}',
        b'{"a": "\\ud83d"}',
        b'{"a": "\\ud83d\\ude00"}',
        b"[" * 99999,
    ]
    source = open_source(write_lines(rows))
    assert [source[i]["a"] for i in range(len(source))] == [1, "😀"]
    assert [row.location for row in source.bad_rows] == [f"train.jsonl:{n}" for n in (2, 3, 4, 5, 7)]
    for row, word in zip(
        source.bad_rows,
        ("not valid JSON", "an array", "not valid UTF-8", "unpaired surrogate", "not valid JSON"),
        strict=True,
    ):
        assert word in row.reason


@pytest.mark.parametrize(
    "twice",
    [
        '{"a": 1, "b": 2, "a": 3}',
        '{"m": [{"a": 1, "a": 1}]}',
        '{"m": {"a": 1, "a": 1}}',
        '{"m": [{"t": [{"a": 1, "a": 1}]}]}',
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_record_with_a_key_twice_is_bad(twice, name, tmp_path):
    good = '{"a": 1, "b": {"a": 2}, "m": [{"a": 1}, {"a": 1}]}'
    text = f"{good}\n{twice}\n" if name.endswith("l") else f"[{good}, {twice}]"
    (tmp_path / name).write_text(text)
    source = open_source(tmp_path / name)
    assert len(source) == 1
    assert [row.reason for row in source.bad_rows] == ["the key 'a' is written twice in it; keep one of them"]


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_text_of_two_bytes_a_letter_is_told_once(coding, name, tmp_path):
    (tmp_path / name).write_bytes("\n".join(['{"a": 1}'] * 25).encode(coding))
    with pytest.raises(DataError, match=rf"{name} is UTF-16; save it as UTF-8$"):
        open_source(tmp_path / name)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_an_array_in_a_file_of_lines_is_told_once(indent, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps([{"a": 1}, {"a": 2}], indent=indent))
    with pytest.raises(DataError, match=r"a\.jsonl is one JSON array, not one object per line; name it \.json$"):
        open_source(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('[\n{"a": 1},\n{"a": 2}\n')  # cut off: no array either
    assert len(open_source(tmp_path / "a.jsonl").bad_rows) == 2


def test_many_threads_read_the_same_file(write_lines):
    source = open_source(write_lines([{"a": i, "text": "x" * (i % 50)} for i in range(500)]))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: source[i]["a"], range(500))) == list(range(500))


def test_the_digest_follows_the_bytes_and_the_renaming(write_lines):
    first = open_source(write_lines([{"a": 1}])).digest
    assert open_source(write_lines([{"a": 1}], "other.jsonl")).digest == first
    assert open_source(write_lines([{"a": 2}])).digest != first
    assert open_source(write_lines([{"a": 1}]), {"a": "b"}).digest != first


def test_columns_are_renamed_over_a_column_of_that_name(write_lines):
    source = open_source(write_lines([{"question": "q", "prompt": "old"}]), {"question": "prompt"})
    assert source[0] == {"prompt": "q"}


def test_a_column_that_no_record_has_is_refused_with_the_near_one(write_lines):
    path = write_lines([{"question": "q"}, {"answer": "a"}])
    with pytest.raises(DataError, match=r"data\.columns\.qestion: no record of train.jsonl .*mean 'question'"):
        open_source(path, {"qestion": "prompt"})
    with pytest.raises(
        DataError, match=r"no record of train.jsonl has the column 'xyz'; its columns are answer, question"
    ):
        open_source(path, {"xyz": "prompt"})
    assert open_source(path, {"answer": "chosen"})[1] == {"chosen": "a"}


def test_a_missing_file_is_named_with_the_folder_and_the_near_files(write_lines, tmp_path):
    write_lines([{"a": 1}])
    with pytest.raises(DataError) as caught:
        open_source("trian.jsonl")
    for part in ("trian.jsonl", str(tmp_path), "train.jsonl"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "no records"),
        ("a.json", b"[]", "no records"),
        ("a.json", b'{"a": 1}', "no list"),
        ("a.json", b'{"a":1}\n{"a":2}', r"name it \.jsonl"),
        ("a.json", b'[{"a": 1},\n{"a"}]', "line 2"),
        ("a.json", b'["\xff"]', "UTF-8"),
        ("a.csv", b"a,b", r"\.csv"),
        ("a.parquet", b"nonsense", "not a readable parquet"),
        ("a.jsonl.gz", b"nonsense", r"a\.jsonl\.gz is not packed: it is no gzip file, although"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-4], r"gzip file is incomplete .*; download it again"),
        ("a.json.gz", gzip.compress(b"{}", mtime=0), "no list"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "no records"),
        ("a.csv.gz", gzip.compress(b"a,b", mtime=0), r"ends in '\.csv\.gz'"),
        ("a", b"{}", r"ends in ''; data files end in \.jsonl, \.jsonl\.gz, \.json, \.json\.gz or \.parquet"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, name, content, reason):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        open_source(tmp_path / name)


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}])
def test_a_json_list_is_read_bare_or_under_data(tmp_path, monkeypatch, wrap):
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(wrap([{"a": 1}, 2, {"a": "\ud800"}, {"a": 3}])).encode())
    source = open_source("a.json", {"a": "b"})
    assert [source[i] for i in range(len(source))] == [{"b": 1}, {"b": 3}]
    assert source.location(1) == "a.json[3]"
    assert [row.location for row in source.bad_rows] == ["a.json[1]", "a.json[2]"]


def test_parquet_rows_are_records(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    rows = [{"chosen": "a", "n": [1, 2]}, {"chosen": "b", "n": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet", row_group_size=1)
    source = open_source("a.parquet", {"n": "m"})
    assert [source[i] for i in range(len(source))] == [{"chosen": "a", "m": [1, 2]}, {"chosen": "b", "m": None}]
    assert source.location(1) == "a.parquet[1]"
    assert len(source.digest) == 64


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json"])
def test_a_packed_file_is_the_file(tmp_path, name):
    rows = [{"a": number, "text": "é" * number} for number in range(50)]
    plain = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(plain)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(plain.encode()))
    packed, source = open_source(tmp_path / f"{name}.gz", {"a": "b"}), open_source(tmp_path / name, {"a": "b"})
    assert [packed[at] for at in reversed(range(50))] == [source[at] for at in reversed(range(50))]
    assert packed.digest == source.digest
    assert Path(packed.location(3)).name.startswith(f"{name}.gz")
    assert len(list(tmp_path.iterdir())) == 2


def test_no_room_to_unpack_is_said(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dstrain.data.sources.files.shutil.copyfileobj", full)
    with pytest.raises(DataError, match=r"cannot be unpacked into .*No space left on device; set TMPDIR"):
        open_source(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("place", ["names", "values", "dates"])
def test_parquet_that_python_cannot_read_is_refused_when_it_is_opened(tmp_path, place):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    late = pyarrow.array([2**62], type=pyarrow.timestamp("us"))
    named = pyarrow.array([{"marker": 1}])
    parquet.write_table(
        pyarrow.table({"a": {"names": named, "values": bad, "dates": late}[place]}), tmp_path / "a.parquet"
    )
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"marker", b"marke\xff") if place == "names" else content)
    with pytest.raises(DataError, match=r"a\.parquet is not a readable parquet file .*; regenerate it"):
        open_source(tmp_path / "a.parquet")


@pytest.mark.parametrize("path", ["x" * 300, "a/" * 3000, "~nosuchuser/a.jsonl", "\0"])
def test_a_path_that_cannot_be_is_refused(path):
    with pytest.raises(DataError, match="; "):
        open_source(path)


def test_a_file_nobody_may_read_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")

    def closed(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read \(Permission denied\); check the path"):
        open_source(tmp_path / "a.jsonl")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r'pip install "dstrain\[parquet\]"'):
        open_source(tmp_path / "a.parquet")


def test_joined_sources_count_on(write_lines):
    first = open_source(write_lines([{"a": 0}, b"bad", {"a": 1}], "one.jsonl"))
    second = open_source(write_lines([{"a": 2}], "two.jsonl"))
    joined = ConcatSource([first, second])
    assert joined.sizes == (2, 1)
    assert [record["a"] for record in joined] == [0, 1, 2]
    assert [joined.location(i) for i in range(3)] == ["one.jsonl:1", "one.jsonl:3", "two.jsonl:1"]
    assert joined.bad_rows == first.bad_rows
    assert joined.digest != ConcatSource([second, first]).digest
    with pytest.raises(IndexError):
        joined[3]


def test_the_first_records_are_a_source_of_their_own(write_lines):
    source = open_source(write_lines([{"a": 0}, {"a": 1}, {"a": 2}]))
    first = HeadSource(source, 2)
    assert [record["a"] for record in first] == [0, 1]
    assert first.location(1) == "train.jsonl:2"
    assert len({source.digest, first.digest, HeadSource(source, 1).digest}) == 3


def test_bad_rows_behind_the_first_records_are_not_theirs(write_lines):
    lines = [b"bad", {"a": 0}, b"bad", {"a": 1}, b"bad"]
    parts = [write_lines(lines, "one.jsonl"), write_lines(lines, "two.jsonl")]
    for source in (ConcatSource([*map(open_source, parts)]) for _ in range(2)):  # the second time from the cache
        bad = [row.location for row in source.bad_rows]
        assert bad == [f"{name}.jsonl:{line}" for name in ("one", "two") for line in (1, 3, 5)]
        for count, number in ((1, 1), (2, 2), (3, 4), (4, 6), (9, 6)):
            assert [row.location for row in HeadSource(source, count).bad_rows] == bad[:number]


def test_reading_and_planning_need_neither_torch_nor_transformers():
    code = (
        "import sys, dstrain.data.sources.open, dstrain.data.formats.preferences, dstrain.data.token_store, "
        "dstrain.data.prepare, dstrain.data.loading.loader, dstrain.data.encoding.preferences, dstrain.data.loading.rows; "
        "print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# A folder of files as records.

ENDINGS = (".pdb", ".ent", ".cif")


def fill(folder: Path) -> Path:
    (folder / "ab").mkdir(parents=True)
    for name in ("2.pdb", "1.CIF", "ab/3.ent.gz", ".hidden.pdb", "notes.txt"):
        (folder / name).write_text(name)
    return folder


def test_files_are_records_in_the_order_of_their_paths(tmp_path: Path) -> None:
    source = FolderSource(fill(tmp_path / "pdb"), {}, ENDINGS)
    names = [Path(source[index]["path"]).name for index in range(len(source))]
    assert names == ["1.CIF", "2.pdb", "3.ent.gz"]
    assert source.location(2).endswith("ab/3.ent.gz")


def test_a_single_file_is_one_record(tmp_path: Path) -> None:
    source = FolderSource(fill(tmp_path / "pdb") / "2.pdb", {}, ENDINGS)
    assert [source[index]["path"] for index in range(len(source))] == [str(tmp_path / "pdb/2.pdb")]


def test_the_digest_is_of_names_and_contents_and_not_of_the_place(tmp_path: Path) -> None:
    digests = {FolderSource(fill(tmp_path / name), {}, ENDINGS).digest for name in ("one", "two")}
    assert len(digests) == 1
    (tmp_path / "one/2.pdb").write_text("2.pdc")  # of the same size
    assert FolderSource(tmp_path / "one", {}, ENDINGS).digest not in digests
    (tmp_path / "two/2.pdb").rename(tmp_path / "two/4.pdb")
    assert FolderSource(tmp_path / "two", {}, ENDINGS).digest not in digests


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"is a folder; name a \.jsonl"):
        open_source(tmp_path)


def test_images_are_looked_up_in_the_folder_that_the_recipe_names(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"image": "a.png"}\n')
    (tmp_path / "photos").mkdir()
    data = DatasetConfig(path=str(tmp_path / "train.jsonl"), media_dir=str(tmp_path / "photos"))
    for source in (open_source(data), open_source(data)):  # read, and known from before
        assert source.get_base_dir(0) == tmp_path / "photos"
    assert open_source(data.model_copy(update={"media_dir": None})).get_base_dir(0) == tmp_path
    with pytest.raises(DataError, match=r"media_dir: .*/nowhere is no folder here; name the folder of the images"):
        open_source(data.model_copy(update={"media_dir": str(tmp_path / "nowhere")}))


def write_shards(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(json.dumps({"chosen": f"{name} yes", "rejected": f"{name} no"}) + "\n")


def test_a_pattern_means_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_shards(tmp_path, "b.jsonl", "a.jsonl", ".hidden.jsonl", "other.json")
    source = open_source(tmp_path / "*.jsonl")
    assert [source[index]["chosen"] for index in range(len(source))] == ["a.jsonl yes", "b.jsonl yes"]
    assert source.location(1).endswith("b.jsonl:1")
    before = source.digest
    write_shards(tmp_path, "c.jsonl")
    assert open_source(tmp_path / "*.jsonl").digest != before


def test_shards_that_are_missing_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, "train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl", "test-00000-of-00001.jsonl")
    assert len(open_source(tmp_path / "test-*.jsonl")) == 1
    with pytest.raises(DataError, match=r"train-\*\.jsonl: the files lack shard 1 of 3 of 'train'; download all"):
        open_source(tmp_path / "train-*.jsonl")
    write_shards(tmp_path, "train-00001-of-00003.jsonl")
    assert len(open_source(tmp_path / "train-*.jsonl")) == 3


@pytest.mark.parametrize(
    ("names", "pattern", "wanted"),
    [
        (["t-00000-of-00003-a09b74.jsonl", "t-00002-of-00003-a09b74.jsonl"], "t-*", "lack shard 1 of 3 of 't'"),
        (["c4-train.00001-of-00002.jsonl"], "*.jsonl", "lack shard 2 of 2 of 'c4-train'"),
        (
            ["train-0-of-2.jsonl", "train-extra-0-of-2.jsonl", "train-extra-1-of-2.jsonl"],
            "*",
            "lack shard 1 of 2 of 'train'",
        ),
        (["t-0-of-2.jsonl", "t-1-of-2.jsonl", "t-1-of-3.jsonl"], "t-*", "shards of 2 and of 3 files of 't'"),
        (["t-0-of-2.jsonl", "t-1-of-2.json"], "t-*", "lack shard [02] of 2 of 't'"),
        (
            ["t-0-of-2.jsonl", "t-1-of-2.jsonl", "t-00-of-2.jsonl"],
            "t-*",
            "holds 3 files where the names of 't' count 2",
        ),
        (["a.jsonl", "a.jsonl.gz"], "a*", "exists compressed too"),
        (["x-0-of-900000000.jsonl"], "x-*", "lack shard 1 of 900000000"),
    ],
)
def test_a_pattern_with_too_few_or_too_many_files_is_refused(
    names: list[str], pattern: str, wanted: str, tmp_path: Path
) -> None:
    write_shards(tmp_path, *names)
    with pytest.raises(DataError, match=wanted):
        open_source(tmp_path / pattern)


@pytest.mark.parametrize(
    ("names", "pattern", "count"),
    [
        (["t-00001-of-00002.jsonl", "t-00002-of-00002.jsonl"], "t-*.jsonl", 2),
        (["w[1].jsonl", "w[1]-b.jsonl", "w1.jsonl"], "w[1]*.jsonl", 2),
        (["a.jsonl", "b.jsonl"], "**.jsonl", 2),
        (["a.jsonl", ".b.jsonl"], "*.jsonl", 1),
    ],
)
def test_a_star_alone_is_special_in_a_pattern(names: list[str], pattern: str, count: int, tmp_path: Path) -> None:
    write_shards(tmp_path, *names)
    (tmp_path / f"t-folder-{count}.jsonl").mkdir()
    assert len(open_source(tmp_path / pattern)) == count


def test_a_broken_link_that_fits_a_pattern_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/nowhere")
    with pytest.raises(DataError, match=r"b\.jsonl: .*; remove it, or name the others"):
        open_source(tmp_path / "*.jsonl")


def test_a_recipe_names_a_pattern_relative_to_itself(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl")
    (tmp_path / "recipe.yaml").write_text("task: rm\ndata: {train: data/train-*.jsonl}\nsteps: 1\noptim: {lr: 1}\n")
    config = resolve_recipe(TrainRequest(recipe=str(tmp_path / "recipe.yaml"))).config
    assert config.data.train[0].path == f"{tmp_path}/data/train-*.jsonl"


def test_a_folder_of_shards_names_their_pattern(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", "train-00000-of-00001.jsonl")
    with pytest.raises(DataError, match=r"is a folder; .* in it \(.*data/\*\.jsonl for all of them\)"):
        open_source(tmp_path / "data")


def test_a_column_that_one_of_the_shards_has_is_no_fault(tmp_path: Path) -> None:
    write_shards(tmp_path, "a.jsonl", "b.jsonl")
    check_columns_exist([open_source(tmp_path / "*.jsonl", {"chosen": "rejected"})])
    with pytest.raises(DataError, match=r"no file has the column 'better'"):
        check_columns_exist([open_source(tmp_path / "*.jsonl", {"better": "chosen"})])


def test_commands_take_a_pattern_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "data", "a.jsonl", "b.jsonl")
    monkeypatch.chdir(tmp_path)
    assert (
        make_eval_source("data/*.jsonl") == make_eval_source(f"{tmp_path}/data/*.jsonl") == f"{tmp_path}/data/*.jsonl"
    )
    with pytest.raises(UsageError, match=r"--data data/\*\.json: there is no such file"):
        make_eval_source("data/*.json")


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl", ""])
def test_a_folder_that_cannot_be_listed_is_no_unexpected_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(DataError, match="name a .jsonl" if not name else "no file"):
        open_source(tmp_path / name)
