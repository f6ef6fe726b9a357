"""What is written under one cut is read under another; what cannot be read is refused by a sentence."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dstrain.batch import Progress
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.state import files
from dstrain.training.state.files import (
    INDEX_FILE,
    INDEX_ROWS_FILE,
    CheckpointReader,
    StateFile,
    check_state_complete,
    find_index_fault,
    iter_state_files,
    write_state,
)
from dstrain.training.state.layout import ParamRange, StateSlice
from dstrain.training.state.manifest import BlockCache, HashedFileReader, inspect_checkpoint, write_hashed_file


def kept(folder: Path, *ranks: Sequence[StateFile], shapes: dict[str, list[int]]) -> Path:
    """A checkpoint of what these ranks wrote."""
    about = {"shapes": shapes, "optimizer": "adamw"}

    def write(place: Path) -> Any:
        found = {}
        for index, own in enumerate(ranks):
            found |= write_state(place, own, about if not index else None)
        return found

    return CheckpointStore(folder=folder, world=SingleProcessWorld()).save(write, Progress(1, 1), {})


def flat_cuts(values: torch.Tensor, ends: Sequence[int]) -> list[list[StateFile]]:
    """A parameter in tensor ranges that end there, each of another rank."""
    starts = [0, *ends[:-1]]
    return [
        [
            *iter_state_files(
                [[StateSlice(values[a:b].clone(), [ParamRange("w", a, b - a, 0)], is_replicated=False)]],
                rank,
                len(ends),
            )
        ]
        for rank, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]


@given(st.lists(st.integers(1, 99), max_size=5), st.integers(0, 99), st.integers(1, 100))
def test_any_range_is_read_whatever_the_cut_was(cuts: list[int], start: int, length: int) -> None:
    import tempfile

    values = torch.randn(100)
    with tempfile.TemporaryDirectory() as folder:
        stored = CheckpointReader(
            kept(Path(folder), *flat_cuts(values, [*sorted({*cuts}), 100]), shapes={"w": [20, 5]})
        )
        end = min(100, start + length)
        into = torch.empty(end - start)
        stored.read_into("w", "weight", into, start)
        assert torch.equal(into, values[start:end])
        assert torch.equal(stored.read_tensor("w"), values.view(20, 5))


def test_what_all_hold_is_written_once_in_equal_shares(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(4), "c": torch.arange(5)}
    parts = [
        StateSlice(value, [ParamRange(name, 0, value.numel(), 0)], is_replicated=True)
        for name, value in tensors.items()
    ]
    ranks = [[*iter_state_files([parts], rank, 3)] for rank in range(3)]
    assert sorted(sum(values.numel() for shard in own for _, values in shard.tensors) for own in ranks) == [10, 10, 10]
    stored = CheckpointReader(
        kept(tmp_path, *ranks, shapes={name: list(value.shape) for name, value in tensors.items()})
    )
    assert all(torch.equal(stored.read_tensor(name), value) for name, value in tensors.items())


def slice_after_a_step() -> StateSlice:
    """The state of a weight, (6, 4), after one step of AdamW."""
    weight = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.randn(6, 4)
    optimizer.step()
    group = optimizer.param_groups[0]
    return StateSlice(weight, [ParamRange("w", 0, 24, 0)], is_replicated=True, optimizer=optimizer, param_group=group)


def test_what_an_optimizer_keeps_comes_back_by_key(tmp_path: Path) -> None:
    part = slice_after_a_step()
    stored = CheckpointReader(kept(tmp_path, [*iter_state_files([[part]], 0, 1)], shapes={"w": [6, 4]}))
    assert stored.state_keys("w") == {"weight", "exp_avg", "exp_avg_sq"}
    assert stored.scalars("w") == {"step": 1.0}
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(stored.read_tensor("w", key), part.optimizer.state[part.tensor][key])


def test_any_reader_of_safetensors_reads_the_files(tmp_path: Path) -> None:
    values = torch.randn(10)
    place = kept(tmp_path, *flat_cuts(values, [4, 10]), shapes={"w": [10]})
    found = {}
    for file in (place / "state").glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
    assert torch.equal(found["w/weight@0"], values[:4])
    assert torch.equal(found["w/weight@4"], values[4:])


@pytest.mark.parametrize("dtype", files.SAFETENSORS_DTYPES, ids=str)
def test_values_of_any_type_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.arange(8 * dtype.itemsize, dtype=torch.uint8).remainder(2 if dtype == torch.bool else 60)
    values = bits.view(dtype) if dtype != torch.bool else bits.bool()
    part = StateSlice(values, [ParamRange("b", 0, 8, 0)], is_replicated=True)
    found = CheckpointReader(kept(tmp_path, [*iter_state_files([[part]], 0, 1)], shapes={"b": [2, 4]})).read_tensor("b")
    assert found.dtype == dtype
    assert torch.equal(found.view(-1).view(torch.uint8), values.view(torch.uint8))


def test_a_missing_range_is_named(tmp_path: Path) -> None:
    place = kept(tmp_path, *flat_cuts(torch.randn(10), [4, 10])[:1], shapes={"w": [10]})
    with pytest.raises(CheckpointError, match="holds no weight of w from value 4 on"):
        CheckpointReader(place).read_tensor("w")


def change_index(place: Path, change: Callable[[dict[str, Any], np.ndarray], object]) -> None:
    """Change the index as somebody would who also writes its hashes."""
    about, rows = json.loads((place / INDEX_FILE).read_text()), np.load(place / INDEX_ROWS_FILE)
    changed = change(about, rows)
    np.save(place / INDEX_ROWS_FILE, rows if changed is None else changed)
    manifest = json.loads((place / "MANIFEST.json").read_text())
    manifest["files"][INDEX_FILE] = write_hashed_file(place / INDEX_FILE, json.dumps(about).encode())
    content = (place / INDEX_ROWS_FILE).read_bytes()
    manifest["files"][INDEX_ROWS_FILE] = write_hashed_file(place / INDEX_ROWS_FILE, content)
    (place / "MANIFEST.json").write_text(json.dumps(manifest))
    assert inspect_checkpoint(place, check_hashes=True).is_complete, "its hashes are right"


def set_rows(column: str, value: int) -> Callable[[dict[str, Any], np.ndarray], None]:
    def change(about: dict[str, Any], rows: np.ndarray) -> None:
        rows[column] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda about, rows: about.clear(),
        lambda about, rows: about.update(names=[]),
        lambda about, rows: about.update(dtypes=["F31"]),
        lambda about, rows: about.update(files=["state/elsewhere.safetensors"]),
        lambda about, rows: about.update(files=["../../secret"]),
        lambda about, rows: rows["start"],
        lambda about, rows: np.array([b"x"]),
        lambda about, rows: rows[::-1],
        set_rows("file", 9),
        set_rows("dtype", -1),
        set_rows("start", -2),
        set_rows("numel", 1 << 60),
        set_rows("numel", -1),
        set_rows("offset", 1 << 62),
        set_rows("offset", -8),
    ],
)
def test_an_index_that_cannot_be_is_refused(change: Any, tmp_path: Path) -> None:
    place = kept(tmp_path, *flat_cuts(torch.randn(10), [4, 10]), shapes={"w": [10]})
    change_index(place, change)
    with pytest.raises(CheckpointError, match="choose another checkpoint"):
        CheckpointReader(place).read_tensor("w")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.replace(b"(2,), }        ", b"(9999999999,),}"),
        lambda content: content.replace(b"(2,)", b"(-2,"),
        lambda content: content.replace(b"(2,)", b"((2,"),
        lambda content: content.replace(b"descr", b"de'cr"),
        lambda content: content.replace(b"{", b"(", 1),
        lambda content: content.replace(b"<i8", b"|O8"),
        lambda content: content[:20],
        lambda content: content + b"x",
        lambda content: b"\x93NUMPY\x09\x00" + content[8:],
    ],
)
def test_a_header_of_an_array_that_does_not_fit_is_refused_and_passed_over(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    good = kept(tmp_path, *flat_cuts(torch.randn(10), [4, 10]), shapes={"w": [10]})
    place = good.with_name("step-00000002")
    shutil.copytree(good, place)
    manifest = json.loads((place / "MANIFEST.json").read_text()) | {"step": 2}
    for name in ("run.json", "progress.json"):
        content = json.dumps(json.loads((place / name).read_text()) | {"step": 2}).encode()
        manifest["files"][name] = write_hashed_file(place / name, content)
    assert find_index_fault(place) == ""
    rows = (place / INDEX_ROWS_FILE).read_bytes()
    assert change(rows) != rows
    manifest["files"][INDEX_ROWS_FILE] = write_hashed_file(place / INDEX_ROWS_FILE, change(rows))
    (place / "MANIFEST.json").write_text(json.dumps(manifest))
    assert inspect_checkpoint(place, check_hashes=True).is_complete, "its hashes are right"
    with pytest.raises(CheckpointError, match=r"the index cannot be read .*choose another checkpoint"):
        CheckpointReader(place)
    checkpoints = CheckpointStore(folder=tmp_path, world=SingleProcessWorld(), find_index_fault=find_index_fault)
    newest, skipped = checkpoints.find_latest_valid()
    assert newest is not None
    assert newest.path == good
    assert "state/index.json: the index cannot be read" in skipped[0].status


def test_opening_reads_the_index_and_no_file_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume of 1,024 ranks must not read a block of 1,024 files in each process."""
    values, opened = torch.randn(64), list[str]()
    place = kept(tmp_path, *flat_cuts(values, [*range(1, 65)]), shapes={"w": [64]})
    read_block = HashedFileReader.read_block

    def count(reader: HashedFileReader, index: int) -> bytes:
        opened.append(reader.path.name)
        return read_block(reader, index)

    monkeypatch.setattr(HashedFileReader, "read_block", count)
    reader = CheckpointReader(place)
    reader.check_complete()
    assert {*opened} == {"about.json", "index.json", "index.npy"}
    part = torch.empty(2)
    reader.read_into("w", "weight", part, 40)
    assert torch.equal(part, values[40:42])
    assert {*opened[3:]} - {"about.json"} == {"rank-00040-000.safetensors", "rank-00041-000.safetensors"}


def test_a_reader_keeps_a_bounded_number_of_bytes_of_all_files(tmp_path: Path) -> None:
    cache = BlockCache(max_bytes=100)
    files = [tmp_path / f"{number}" for number in range(10)]
    readers = [HashedFileReader(file, write_hashed_file(file, bytes(40)), cache) for file in files]
    assert all(reader.read_all() == bytes(40) for reader in readers)
    assert [cache.get(file, 0) is not None for file in files] == [False] * 8 + [True] * 2


@pytest.mark.parametrize(
    "about",
    [
        {"shapes": {"w": [10**13]}, "optimizer": "adamw"},  # 40 TB
        {"shapes": {"w": [-1]}, "optimizer": "adamw"},
        {"shapes": {"w": "ten"}, "optimizer": "adamw"},
        {"shapes": {"w": [10]}},
        {"optimizer": "adamw"},
        [],
    ],
)
def test_an_account_that_cannot_be_is_refused(about: Any, tmp_path: Path) -> None:
    own = flat_cuts(torch.randn(10), [10])[0]
    checkpoints = CheckpointStore(folder=tmp_path, world=SingleProcessWorld())
    place = checkpoints.save(lambda folder: write_state(folder, own, about), Progress(1, 1), {})
    assert inspect_checkpoint(place, check_hashes=True).is_complete, "its hash is right"
    with pytest.raises(CheckpointError, match="choose another checkpoint"):
        CheckpointReader(place).read_tensor("w")


def test_a_hole_between_two_ranges_is_named_and_an_overlap_is_none(tmp_path: Path) -> None:
    values = torch.randn(10)

    def tensor_ranges(*bounds: tuple[int, int]) -> list[StateFile]:
        return [
            StateFile(f"rank-00000-{index:03d}.safetensors", [(f"w/weight@{low}", values[low:high])])
            for index, (low, high) in enumerate(bounds)
        ]

    hole = kept(tmp_path / "hole", tensor_ranges((0, 4), (5, 10)), shapes={"w": [10]})
    with pytest.raises(CheckpointError, match="holds no weight of w from value 4 on"):
        CheckpointReader(hole).read_tensor("w")
    overlap = kept(tmp_path / "overlap", tensor_ranges((0, 6), (2, 5), (3, 10)), shapes={"w": [10]})
    assert torch.equal(CheckpointReader(overlap).read_tensor("w"), values)


def test_a_checkpoint_without_this_state_is_refused(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(folder=tmp_path, world=SingleProcessWorld())
    place = checkpoints.save(lambda folder: {"x": write_hashed_file(folder / "x", b"")}, Progress(1, 1), {})
    with pytest.raises(CheckpointError, match="has no state that this version can read"):
        CheckpointReader(place)


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self._trace,)


@pytest.mark.parametrize("name", ["state/rank-00000-001.pt", "state/pytorch_model.bin", "optimizer.pkl"])
@pytest.mark.parametrize("in_manifest", [True, False])
def test_a_planted_pickle_is_refused_by_name_and_not_run(name: str, in_manifest: bool, tmp_path: Path) -> None:
    content, trace = pickle.dumps(Evil(tmp_path / "trace")), tmp_path / "trace"
    place = kept(tmp_path / "run", *flat_cuts(torch.randn(10), [10]), shapes={"w": [10]})
    entry = write_hashed_file(place / name, content)
    if in_manifest:
        manifest = json.loads((place / "MANIFEST.json").read_text())
        manifest["files"][name] = entry
        manifest["files_per_rank"][0] += "rank-00000" in name
        (place / "MANIFEST.json").write_text(json.dumps(manifest))
        assert inspect_checkpoint(place, check_hashes=True).is_complete, "its hash is right"
    with pytest.raises(CheckpointError, match=rf"{name} may be a pickle, which runs code when it is read"):
        CheckpointReader(place)
    assert not trace.exists()
    pickle.loads(content)  # noqa: S301  it would have
    assert trace.exists()


def test_a_checkpoint_without_a_value_it_names_is_refused_before_it_gets_its_name(tmp_path: Path) -> None:
    whole, named = flat_cuts(torch.randn(10), [4, 10]), {"w": [10]}
    check_state_complete(kept(tmp_path / "whole", *whole, shapes=named))
    for reason, ranks, shapes in (
        ("no weight of lost from value 0", whole, named | {"lost": [3]}),
        ("no weight of w from value 4", whole[:1], named),
        ("no weight of w from value 10", whole, {"w": [11]}),
    ):
        with pytest.raises(CheckpointError, match=reason):
            check_state_complete(kept(tmp_path / reason.replace(" ", "-"), *ranks, shapes=shapes))

    def write(place: Path) -> Any:
        return write_state(place, whole[0], {"shapes": named, "optimizer": "adamw"})

    checkpoints = CheckpointStore(
        folder=tmp_path / "run", world=SingleProcessWorld(), check_usable=check_state_complete
    )
    with pytest.raises(CheckpointError, match="no weight of w from value 4"):
        checkpoints.save(write, Progress(1, 1), {})
    assert not [*(tmp_path / "run").iterdir()], "nothing that looks like a checkpoint"


def test_what_an_optimizer_keeps_must_be_whole_too(tmp_path: Path) -> None:
    (shard,) = iter_state_files([[slice_after_a_step()]], 0, 1)
    cut = [(name, values[:-1] if "exp_avg_sq" in name else values) for name, values in shard.tensors]
    with pytest.raises(CheckpointError, match="no exp_avg_sq of w from value 23"):
        check_state_complete(kept(tmp_path, [StateFile(shard.name, cut, shard.scalars)], shapes={"w": [6, 4]}))


def test_a_name_without_values_is_not_held(tmp_path: Path) -> None:
    """Checkpoints of LoRA with frozen adapters named those too (tasks dpo and kto): without them they can be read."""
    stored = CheckpointReader(
        kept(tmp_path, *flat_cuts(torch.randn(10), [10]), shapes={"w": [10], "frozen": [4], "none": [0]})
    )
    assert stored.shapes == {"w": (10,), "none": (0,)}
