"""What wandb wrote into a run folder, read back: LevelDB's log format around protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, up to where it was torn.

    After 7 bytes of the file's own come blocks of 32 KiB with pieces: checksum (4 bytes), size (2), kind (1; whole,
    first, middle, last). github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def files(run_dir: Path) -> list[Path]:
    """The .wandb files of a run folder, one for each start, in their order: run-DATE_TIME-ID and offline-run-…"""
    return sorted(
        (run_dir / "wandb").glob("*run-*/*.wandb"), key=lambda path: path.parent.name.removeprefix("offline-")
    )


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def rows(path: Path) -> list[dict[str, Any]]:
    return [values(record.history.item) for record in records(path) if record.HasField("history")]


def only(path: Path, kind: str) -> Any:
    """The one record of a kind: run, exit, preempting."""
    found = [getattr(record, kind) for record in records(path) if record.HasField(kind)]
    assert len(found) == 1, (kind, found)
    return found[0]
