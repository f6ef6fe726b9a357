"""The cache: an entry is what was written, or it is built again, whatever happened to its files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from dstrain import cache
from dstrain.cache import (
    cache_root,
    check_once,
    entry_path,
    file_digest,
    file_state,
    get_or_build,
    load_entry,
    load_file_result,
    save_file_result,
    write_entry,
)
from dstrain.cli import main
from dstrain.config.schema import DatasetConfig
from dstrain.data.encoding.trained_tokenizer import load_or_train_tokenizer
from dstrain.data.loading.loader import make_batch
from dstrain.data.sources.base import ConcatSource
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import load_or_build_store
from dstrain.data.vision.images import ImageIndex, ImageIndexWriter
from dstrain.data.vision.processor import compute_image_stats
from dstrain.errors import DataError, RunError
from dstrain.files import partial_path
from dstrain.tasks.docqa.pages import PdfDocument
from dstrain.tasks.protein.structures import load_or_cluster
from dstrain.training.precompute_outputs import read_columns, write_columns
from tests.unit.tasks.docqa.pdf_files import write_pdf
from tests.vision_recipes import named_recipe
from tests.vocabulary import wait_until

KEY = {"what": "test", "n": 1}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the cache has told."""
    found: list[str] = []
    monkeypatch.setattr("dstrain.cache.log_stderr", found.append)
    return found


def read(folder: Path) -> str:
    return (folder / "text").read_text()


def get(key: dict[str, Any] = KEY, content: str = "content", **options: Any) -> str:
    """Return the text of an entry, which is `content` where it has to be built."""
    return get_or_build("tokens", key, lambda folder: (folder / "text").write_text(content), read, **options)


# Every kind of entry: a function that returns the value of entry 0 or 1, from the cache or built.


def tokens(folder: Path, which: int) -> Any:
    rows = [{"ids": [*range(at + which)], "score": at / 2, "sample": at} for at in range(300)]
    store = load_or_build_store({"which": which}, lambda report: [rows])
    return [(row["ids"].tolist(), row["score"], row["sample"]) for row in store]


def tokenizers(folder: Path, which: int) -> Any:
    path = folder / f"text-{which}.jsonl"
    if not path.exists():
        path.write_text(json.dumps({"text": ["the the the", "number number"][which]}) + "\n")
    source = ConcatSource([open_source(DatasetConfig(path=str(path)), {})])
    tokenizer = load_or_train_tokenizer(source, lambda record: [record["text"]], "text", 262)
    return tokenizer.get_vocab(), tokenizer.eos_token, tokenizer.pad_token, tokenizer("the number").input_ids


def documents(folder: Path, which: int) -> Any:
    path = folder / f"{which}.pdf"
    if not path.exists():
        write_pdf(path, [f"page of {which}"])
    document = PdfDocument(path, path.name, 36)
    return document.num_pages, document.read_texts(), document.get_image(1).get_file().read_bytes()


def references(folder: Path, which: int) -> Any:
    key, columns = {"which": which}, {"chosen": np.arange(9.0) + which, "rejected": np.arange(9.0) * which}
    if (found := load_entry("references", key, read_columns)) is None:
        write_entry("references", key, lambda place: write_columns(place, columns))
        found = load_entry("references", key, read_columns)
    assert found is not None
    return {name: column.tolist() for name, column in found.items()}


def clusters(folder: Path, which: int) -> Any:
    sequences = [np.arange(9), np.arange(9) + 9 * which, np.arange(30) * 7 % 20]
    return load_or_cluster(f"digest {which}", sequences, 0.4).tolist()


def image_statistics(folder: Path, which: int) -> Any:
    path = folder / f"image-{which}.jsonl"
    if not path.exists():
        Image.new("RGB", (8, 8), (which * 90, 20, 30)).save(folder / f"{which}.png")
        path.write_text(json.dumps({"image": f"{which}.png"}) + "\n")

    class Parsed:
        def __init__(self, record: dict[str, Any]) -> None:
            self.images = [record["image"]]

    return compute_image_stats(open_source(path), Parsed)  # type: ignore[arg-type]


def digests(folder: Path, which: int) -> Any:
    path = folder / f"digest-{which}"
    if not path.exists():
        path.write_bytes(b"%d" % which * 9)
    return file_digest(path)


def images(folder: Path, which: int) -> Any:
    """An image whose copy is smaller; prepared again each time, as `find_change` only compares sizes."""
    path = folder / f"photo-{which}.png"
    if not path.exists():
        noise = np.random.RandomState(which).randint(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    index = folder / "index"
    loaded = []
    if (index / f"{which}").exists():  # as a run that goes on
        loaded.append(ImageIndex(index / f"{which}")[0].load(halve).tobytes())
        shutil.rmtree(index / f"{which}")
    (index / f"{which}").mkdir(parents=True)
    writer = ImageIndexWriter(halve, cache_root() / "images" / "processor")
    writer.assign_position(writer.get_entry(path.name, folder))
    writer.write(index / f"{which}")
    loaded.append(ImageIndex(index / f"{which}")[0].load().tobytes())
    assert len({*loaded}) == 1
    return loaded[0]


def halve(image: Image.Image) -> Image.Image:
    return image.resize((12, 12))


KINDS = [tokens, tokenizers, documents, references, clusters, image_statistics, digests, images]


def flip_bit(file: Path, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


def write_zeros(file: Path, other: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def truncate(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def swap(file: Path, other: Path) -> None:
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def delete(file: Path, other: Path) -> None:
    file.unlink()


def link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def delete_folder(file: Path, other: Path) -> None:
    shutil.rmtree(file.parent)


def swap_folders(file: Path, other: Path) -> None:
    aside = file.parent.with_name("aside")
    file.parent.rename(aside)
    other.parent.rename(file.parent)
    aside.rename(other.parent)


def link_folder(file: Path, other: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.symlink_to(other.parent)


def add_file(file: Path, other: Path) -> None:
    (file.parent / "added_tokens.json").write_text('{"the": 0}')


def give_to_another_user(file: Path, other: Path) -> None:
    flip_bit(file, other)
    os.chown(file, 12345, 12345)


DAMAGES: list[tuple[Any, list[Any]]] = [
    *((damage, []) for damage in (
        flip_bit, write_zeros, truncate, empty, swap, delete, link, delete_folder, swap_folders, link_folder, add_file,
    )),
    (give_to_another_user, [pytest.mark.skipif(os.geteuid() != 0, reason="only root may chown")]),
]  # fmt: skip


def is_quick(kind: Any, damage: Any) -> bool:
    """Every damage with one kind of entries, every kind with one damage: one mechanism reads them all."""
    return kind is tokens or damage is flip_bit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        pytest.param(
            kind, damage, marks=[*marks, *([] if is_quick(kind, damage) else [pytest.mark.slow])],
            id=f"{kind.__name__}-{damage.__name__}",
        )
        for kind in KINDS
        for damage, marks in DAMAGES
    ],
)  # fmt: skip
def test_a_damaged_entry_never_gives_other_values(
    kind: Callable[[Path, int], Any], damage: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    values = [kind(tmp_path, 0), kind(tmp_path, 1)]
    if kind is digests:  # nothing is cached of a file that was written a moment ago
        for which in range(2):
            os.utime(tmp_path / f"digest-{which}", ns=(0, 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "RACY_WINDOW_NS", -(10**12))
            values = [kind(tmp_path, 0), kind(tmp_path, 1)]
    assert values[0] != values[1]
    shutil.copytree(cache_root(), tmp_path / "whole", symlinks=True)
    names = [path.relative_to(cache_root()) for path in sorted(cache_root().rglob("*"))]
    files = [name for name in names if name.parts[0] == kind.__name__ and (cache_root() / name).is_file()]
    assert files
    for name in files:
        # A file of the same name in another entry, else any other.
        others = sorted((other for other in files if other != name), key=lambda other: other.name != name.name)
        damage(cache_root() / name, cache_root() / others[0])
        assert [kind(tmp_path, 0), kind(tmp_path, 1)] == values, f"{damage.__name__} of {name}"
        assert [kind(tmp_path, 0), kind(tmp_path, 1)] == values, f"after {damage.__name__} of {name} was repaired"
        shutil.rmtree(cache_root())
        shutil.copytree(tmp_path / "whole", cache_root(), symlinks=True)


def test_what_is_built_again_is_named_once(lines: list[str]) -> None:
    get()
    (entry_path("tokens", KEY) / "text").write_text("CONTENT")
    assert [get(), get()] == ["content", "content"]
    assert lines == [f"{entry_path('tokens', KEY)} in the cache is built again: text is not what was written"]
    (entry_path("tokens", KEY) / "MANIFEST.json").unlink()
    get()
    assert lines[1].endswith(": MANIFEST.json is missing")


def test_a_build_lists_few_of_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a document is an entry, and a folder of a hundred thousand is not listed for each."""
    listed: list[str] = []
    listdir = os.listdir
    for number in range(60):
        get_or_build("documents", {"n": number}, lambda folder: None, lambda folder: True)
    monkeypatch.setattr(os, "listdir", lambda path: listed.extend(found := listdir(path)) or found)
    get_or_build("documents", {"n": "next"}, lambda folder: None, lambda folder: True)
    assert len(listed) < 20


def test_an_entry_is_built_once_for_a_key() -> None:
    assert get(content="a") == get(content="b") == get(dict(reversed(KEY.items())), content="c") == "a"
    assert get({**KEY, "n": 2}, content="b") == "b"


def test_an_unchanged_file_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    get()
    monkeypatch.setattr(cache, "RACY_WINDOW_NS", -(10**12))
    get()
    hashed: list[Any] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(name) or real(file, name))
    get()
    assert not hashed
    os.utime(entry_path("tokens", KEY) / "text", ns=(5, 5))
    get()
    assert len(hashed) == 1


def test_a_value_that_is_out_of_date_is_built_again(lines: list[str]) -> None:
    get(content="old")
    stale = {"find_change": lambda value: "x.png has changed" if value == "old" else None}
    assert [get(content="new", **stale), get(**stale)] == ["new", "new"]
    assert lines == [f"{entry_path('tokens', KEY)} in the cache is built again: x.png has changed"]


def test_entries_that_another_process_checked_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    get()
    calls: list[Path] = []
    monkeypatch.setattr(cache, "find_mismatch", lambda folder, key: calls.append(folder))
    with check_once() as checked:
        get()
        get()
    assert (len(calls), checked) == (1, {str(entry_path("tokens", KEY))})
    with check_once(checked):
        get()
    assert len(calls) == 1
    get()
    assert len(calls) == 2


def test_a_fault_while_building_leaves_nothing_behind(root: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "text").write_text("half")
        raise KeyError("boom")

    with pytest.raises(KeyError):
        get_or_build("tokens", KEY, broken, read)
    assert [*(root / "tokens").iterdir()] == []
    assert get() == "content"


CHILD = """
import os, sys, time
from pathlib import Path
from dstrain.cache import get_or_build
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
def build(place):
    with (folder / "built").open("a") as file:
        file.write("x")
    (place / "a").write_text("a")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (folder / "go on").exists():
        time.sleep(0.01)
    (place / "b").write_text("b")
os.environ["DSTRAIN_CACHE"] = str(folder)
value = get_or_build("tokens", {"what": "race"}, build, lambda place: sorted(os.listdir(place)))
print(value, "torch" in sys.modules)
"""
FILES = "['MANIFEST.json', 'a', 'b'] False\n"


def child(folder: Path, seconds: float, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", before + CHILD, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_processes_that_race_one_builds(tmp_path: Path) -> None:
    racers = [child(tmp_path, 0.5) for _ in range(3)]
    assert [racer.communicate(timeout=60)[0] for racer in racers] == [FILES] * 3
    assert (tmp_path / "built").read_text() == "x"
    assert not [*tmp_path.glob("tokens/*.lock")]


def test_a_process_that_waits_names_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path))
    builder, lines = child(tmp_path, 60.0), list[str]()
    wait_until((tmp_path / "built").exists)

    def echo(line: str) -> None:
        lines.append(line)
        if "has been building for" in line:
            (tmp_path / "go on").touch()

    key = {"what": "race"}
    monkeypatch.setattr("dstrain.cache.log_stderr", echo)
    monkeypatch.setattr("dstrain.cache.LOG_SECONDS", 0.2)
    found = get_or_build("tokens", key, read, lambda place: sorted(os.listdir(place)))
    builder.communicate(timeout=60)
    assert found == ["MANIFEST.json", "a", "b"]
    assert any(f"process {builder.pid} on " in line for line in lines)


def test_what_a_killed_builder_left_is_not_an_entry(tmp_path: Path) -> None:
    first = child(tmp_path, 60.0)
    wait_until(lambda: (tmp_path / "built").exists() and (tmp_path / "built").read_text() == "x")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert child(tmp_path, 0.0).communicate(timeout=60)[0] == FILES
    assert (tmp_path / "built").read_text() == "xx"
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [entry_path("", {"what": "race"}).name]


WITHOUT_LOCK = """
import fcntl
fcntl.flock = lambda *arguments: None  # a lock of another host's: it keeps nobody out
"""


def test_without_a_common_lock_each_builds_and_all_take_the_first(tmp_path: Path) -> None:
    racers = [child(tmp_path, 60.0, WITHOUT_LOCK) for _ in range(3)]
    wait_until(lambda: (tmp_path / "built").exists() and (tmp_path / "built").read_text() == "xxx")
    (tmp_path / "go on").touch()
    assert [racer.communicate(timeout=60) for racer in racers] == [(FILES, "")] * 3
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [entry_path("", {"what": "race"}).name]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_no_fault(lines: list[str], monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert [get(), get()] == ["content", "content"]
    assert len(lines) == 1
    assert "cannot be locked" in lines[0]


def test_a_link_in_place_of_the_lock_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (root / "tokens").mkdir(parents=True)
    Path(f"{entry_path('tokens', KEY)}.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match=r"\.lock"):
        get()
    assert (tmp_path / "victim").read_text() == "precious"


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Let no file be opened whose name ends with `suffix`, as if it were another user's."""
    real = os.open

    def refuse(path: Any, *options: Any) -> int:
        if str(path).endswith(suffix):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *options)

    monkeypatch.setattr(os, "open", refuse)


def test_a_lock_that_another_user_holds_open_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file cannot be opened: a rename decides whose entry counts."""
    refuse_to_open(monkeypatch, ".lock")
    assert get() == "content"


def test_partial_folders_of_the_dead_are_removed_and_of_the_living_left(root: Path) -> None:
    place = entry_path("tokens", KEY)
    mine, dead = partial_path(place), subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    far = place.with_name(f"{place.name}.{'0' * 12}-{dead.pid}-01234567.partial")
    for folder in (mine, gone, far):
        folder.mkdir(parents=True)
        (folder / "text").write_bytes(b"")
    Path(f"{place}.lock").write_text("[1]")  # of the dead one
    get()
    assert [folder.is_dir() for folder in (mine, gone, far)] == [True, False, True]


def test_an_entry_without_a_lock_removes_what_a_killed_process_left(root: Path) -> None:
    place, dead = entry_path("references", KEY), subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = partial_path(place)
    mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-")).mkdir(parents=True)
    write_entry("references", KEY, lambda folder: None)
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_an_entry_that_another_process_finished_first_is_taken(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(folder: Path) -> None:
        monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "elsewhere"))
        get(content="first")
        finished = entry_path("tokens", KEY)
        monkeypatch.setenv("DSTRAIN_CACHE", str(root))
        finished.rename(entry_path("tokens", KEY))
        (folder / "text").write_text("second")

    assert get_or_build("tokens", KEY, slow, read) == "first"
    assert not list(root.glob("tokens/*.partial"))


def test_a_cache_that_cannot_be_written_is_named(root: Path) -> None:
    root.write_text("")
    with pytest.raises(DataError, match=r"cannot be written into the cache.*set DSTRAIN_CACHE"):
        get()


def test_a_cache_that_is_removed_during_a_build_is_named(root: Path) -> None:
    def build(folder: Path) -> None:
        shutil.rmtree(root)
        (folder / "text").write_text("")

    with pytest.raises(DataError, match=r"was removed from the cache while it was written; start again"):
        get_or_build("tokens", KEY, build, read)


def test_an_entry_that_only_its_owner_may_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    get()
    refuse_to_open(monkeypatch, "MANIFEST.json")
    with pytest.raises(DataError, match=r"MANIFEST\.json in the cache cannot be read .*let its owner make it readable"):
        get()


def test_a_lock_is_released_where_closing_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(path: Any, *options: Any, **others: Any) -> None:
        if str(path).endswith(".lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, *options, **others)

    monkeypatch.setattr(os, "unlink", refuse)
    assert get() == "content"
    with Path(f"{entry_path('tokens', KEY)}.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_store_whose_folder_is_removed_is_read_to_its_end(tmp_path: Path) -> None:
    rows = [{"ids": [*range(at)], "sample": at} for at in range(300)]
    store = load_or_build_store(KEY, lambda report: [rows])
    shutil.rmtree(cache_root())
    assert [row["ids"].tolist() for row in store] == [row["ids"] for row in rows]
    assert store.find_change() is None


def test_an_image_whose_copy_is_removed_is_read_from_its_file(tmp_path: Path) -> None:
    first = images(tmp_path, 0)
    index = ImageIndex(tmp_path / "index" / "0")
    shutil.rmtree(cache_root())
    assert index[0].load(halve).tobytes() == first
    with pytest.raises(
        DataError, match=r"the copy of .*photo-0.png, .* is gone or damaged; run `dstrain prepare` again"
    ):
        index[0].load()


def test_an_image_inside_the_data_without_its_copy_is_refused_by_name(tmp_path: Path) -> None:
    images(tmp_path, 0)
    writer = ImageIndexWriter(halve, cache_root() / "images" / "processor")
    writer.assign_position(writer.get_entry((tmp_path / "photo-0.png").read_bytes(), tmp_path))
    writer.write(tmp_path)
    index = ImageIndex(tmp_path)
    (copy,) = cache_root().rglob("*.png")
    flip_bit(copy, copy)
    with pytest.raises(DataError, match=r"the copy of an image of \d+ bytes within the data, .* is gone or damaged"):
        index[0].load()
    assert index.find_change() is not None, "so that the next start makes it again"


def test_a_copy_that_cannot_be_read_for_now_is_left(tmp_path: Path) -> None:
    images(tmp_path, 0)
    writer = ImageIndexWriter(halve, cache_root() / "images" / "processor")
    writer.assign_position(writer.get_entry((tmp_path / "photo-0.png").read_bytes(), tmp_path))
    writer.write(tmp_path)
    image = ImageIndex(tmp_path)[0]
    (copy,) = cache_root().rglob("*.png")
    pixels, (soft, hard) = image.load().tobytes(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be read, or is not what was prepared"):
            image.load()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert copy.exists()
    assert image.load().tobytes() == pixels


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("DSTRAIN_CACHE")
    assert cache_root() == Path("/b/dstrain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "dstrain"


@pytest.mark.parametrize("name", ["DSTRAIN_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_in_an_unknown_home_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("DSTRAIN_CACHE")
    monkeypatch.setenv(name, "~nosuchuser/cache")
    with pytest.raises(DataError, match=r"~nosuchuser/cache.* begins with ~, .*; set DSTRAIN_CACHE to"):
        cache_root()


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "RACY_WINDOW_NS", -(10**12))  # the file is as young as this test
    (file := tmp_path / "a.jsonl").write_text("one")
    first = file_digest(file)
    assert load_file_result(file, "sha256") == first == file_digest(file)
    file.write_text("another")
    assert load_file_result(file, "sha256") is None
    assert file_digest(file) != first


def test_a_file_that_changed_while_it_was_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "a").write_text("one")
    state = file_state(file)
    os.utime(file, (1, 1))
    save_file_result(file, "x", 1, time.time_ns(), state)
    assert load_file_result(file, "x") is None


def test_a_store_that_is_cut_short_in_use_is_named(tmp_path: Path) -> None:
    rows = [{"ids": [at] * 40, "sample": at} for at in range(300)]
    store = load_or_build_store(KEY, lambda report: [rows])
    os.truncate(store.folder / "ids.ends.npy", 200)

    class Dataset:
        def __init__(self) -> None:
            self.store = store

        def __getitem__(self, index: int) -> Any:
            raise ValueError("shape mismatch")

    with pytest.raises(RunError, match=r"ids\.ends\.npy was changed while it was in use, and samples 7 cannot be read"):
        make_batch(Dataset(), lambda examples: None, [7], 0)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_file_names_in_the_data_need_not_be_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    for kind in ("protein", "docqa"):
        folder = tmp_path / kind
        folder.mkdir()
        _, values = named_recipe(kind, folder)
        if kind == "protein":
            (folder / "train" / "000.pdb").rename(folder / "train" / f"{name}.pdb")
        else:
            (folder / "pages").mkdir()
            (folder / "train-0-0.png").rename(folder / "pages" / f"{name}.png")
            rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
            rows[0] = {"question": "Page 1?", "answers": ["red"], "document": "pages"}
            (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
        for _ in range(2):
            told = CliRunner().invoke(main, ["prepare", str(folder / "recipe.yaml"), "--json"])
            assert told.exit_code == 0, told.output


def test_numbers_as_names_in_a_key_give_the_entry_again() -> None:
    """JSON has only texts as names, and orders 9 and 10 otherwise."""
    assert get({"classes": {9: "a", 10: "b"}}) == get({"classes": {9: "a", 10: "b"}}, "built again")
    assert get({"classes": {9: "a", "b": "c"}}) == "content"


def test_json_that_is_nested_deeply_is_damage(tmp_path: Path) -> None:
    """json.loads raises RecursionError for it, which is no ValueError."""
    write_entry("tokens", KEY, lambda folder: (folder / "a").write_text("a"))
    (entry_path("tokens", KEY) / "MANIFEST.json").write_text("[" * 60_000)
    assert load_entry("tokens", KEY, lambda folder: "loaded") is None
    assert get_or_build("tokens", KEY, lambda folder: (folder / "a").write_text("a"), lambda folder: "built") == "built"
    (tmp_path / "data.txt").write_text("text")
    os.utime(tmp_path / "data.txt", (1, 1))
    digest = file_digest(tmp_path / "data.txt")
    for path in (cache_root() / "digests").rglob("*.json"):
        path.write_text("[" * 60_000)
    assert file_digest(tmp_path / "data.txt") == digest
