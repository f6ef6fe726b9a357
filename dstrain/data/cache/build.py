"""From data files to a token cache: every record read once, the bad ones named, and a verdict on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.cache_dir import cache_root
from dstrain.data.cache.bad_record_summary import format_bad_rows, group_by_reason
from dstrain.data.cache.process_pool import SINGLE_PROCESS, EncodedChunk, ProcessPoolConfig, map_chunks
from dstrain.data.cache.token_store import BuildReport, TokenStore, WithExtraFiles, load_or_build_store
from dstrain.data.records import BadRecord, BadRow, Encode, EncodeResult, try_parse
from dstrain.data.sources.base import Source
from dstrain.errors import DataError

CACHE_FORMAT = 5
"""Raise it when the same data would give other examples: old caches are then left alone."""
CHUNK_SIZE, IMAGE_CHUNK_SIZE, PARALLEL_CHUNK_SIZE = 1000, 200, 250
"""Records in memory at once; those with images may hold their bytes; those that one of several processes takes next."""
MAX_BAD_FRACTION = 0.01
"""Bad records up to this share are skipped where `data.on_error` says nothing."""


@dataclass(frozen=True)
class StatefulEncode:
    """An `Encode` that needs to know what came before a chunk."""

    encode: Encode
    restore_context: Callable[[Iterator[dict[str, Any]]], None]
    """Given the records before a chunk, the last one first: has `make` go on as if it had encoded them."""

    def __call__(self, rows: list[tuple[int, dict[str, Any]]]) -> Sequence[EncodeResult | list[EncodeResult]]:
        return self.encode(rows)


@dataclass(frozen=True, kw_only=True)
class PreparePolicy:
    """By how many processes records are encoded, and what to do about bad ones."""

    task: str
    """For the command that the refusal names."""
    on_error: str | None = None
    """skip: leave them out; fail: refuse any; None: refuse more than 1 %."""
    processes: ProcessPoolConfig = SINGLE_PROCESS


def compose_encode(
    parse: Callable[[dict[str, Any]], Any], encode: Callable[[list[Any]], Sequence[EncodeResult | list[EncodeResult]]]
) -> Encode:
    """An `Encode` that reads every record and encodes those that can be read together; the others keep their fault."""

    def encode_rows(rows: list[tuple[int, dict[str, Any]]]) -> list[EncodeResult | list[EncodeResult]]:
        found = [try_parse(parse, record) for _, record in rows]
        coded = iter(encode([item for item in found if not isinstance(item, BadRecord)]))
        return [item if isinstance(item, BadRecord) else next(coded) for item in found]

    return encode_rows


def prepare(
    source: Source, encode: Encode, key: Mapping[str, Any], policy: PreparePolicy, folder: Path | None = None
) -> TokenStore:
    """The store of a source's examples, from the cache where it is there. Raises DataError for bad records.

    `key` names all that `encode` depends on; the data and the format are added to it. The verdict is no part of
    the cache: another `on_error` needs no new tokens. An `encode` that is `WithFiles` leaves its files in the store.
    """
    full = {"format": CACHE_FORMAT, "data": source.digest, **key}

    def build(report: BuildReport) -> Iterator[list[Mapping[str, Any]]]:
        if isinstance(encode, WithExtraFiles):
            return iter_encoded(source, encode, report, IMAGE_CHUNK_SIZE)
        return iter_encoded(source, encode, report, CHUNK_SIZE, policy.processes)

    whole = WithExtraFiles(build, encode.write_extra_files) if isinstance(encode, WithExtraFiles) else build
    store = load_or_build_store(folder or cache_root(), full, whole)
    check_bad_records(store.report, policy)
    return store


def iter_encoded(
    source: Source,
    encode: Encode,
    report: BuildReport,
    chunk_size: int = CHUNK_SIZE,
    processes: ProcessPoolConfig = SINGLE_PROCESS,
) -> Iterator[list[Mapping[str, Any]]]:
    """The examples of all good records, in chunks, with the record's index as `sample`; the report fills up.

    A key that ends in `_cut` is counted, not kept. Raises RunError where one of several processes is ended.
    """
    report.read = len(source) + len(source.bad_rows)
    report.sizes = list(getattr(source, "sizes", ()))
    report.bad.extend(source.bad_rows)
    count = processes.num_processes_for(len(source))
    size = min(chunk_size, PARALLEL_CHUNK_SIZE) if count > 1 and not isinstance(encode, StatefulEncode) else chunk_size
    spans = [(start, min(start + size, len(source))) for start in range(0, len(source), size)]
    if count > 1:
        pieces = map_chunks(partial(_encode_range, source, encode, True), spans, processes)
    else:
        pieces = (_encode_range(source, encode, False, *span) for span in spans)
    for piece in pieces:
        report.bad += [BadRow(source.location(index), reason) for index, reason in piece.bad]
        for name, cut in piece.cuts.items():
            report.cuts[name] = report.cuts.get(name, 0) + cut
        report.kept += len(piece.examples)
        yield piece.examples


def _encode_range(source: Source, encode: Encode, is_parallel: bool, start: int, stop: int) -> EncodedChunk:
    """The records from `start` to `stop`; `apart`: another process may have encoded those before them."""
    if is_parallel and isinstance(encode, StatefulEncode):
        encode.restore_context(source[index] for index in reversed(range(start)))
    rows = [(index, source[index]) for index in range(start, stop)]
    piece = EncodedChunk()
    found = zip(rows, encode(rows), strict=True)
    for index, example in ((index, one) for (index, _), of in found for one in (of if isinstance(of, list) else [of])):
        if isinstance(example, BadRecord):
            piece.bad.append((index, example.reason))
            continue
        for name in [name for name in example if name.endswith("_cut")]:
            piece.cuts[name] = piece.cuts.get(name, 0) + int(example[name])
        kept = {name: value for name, value in example.items() if not name.endswith("_cut")}
        piece.examples.append(kept | {"sample": index})
    return piece


def check_bad_records(report: BuildReport, policy: PreparePolicy) -> None:
    """Nothing where the records may be used as `on_error` says. Raises DataError with the first bad ones of each kind."""
    limit = {"skip": 1.0, "fail": 0.0, None: MAX_BAD_FRACTION}[policy.on_error]
    bad, share = len(report.bad), len(report.bad) / max(report.read, 1)
    if share <= limit and report.kept:
        return
    told = f"{bad} of {report.read} records ({share:.1%}) cannot be used"
    if 1 < bad == report.read and len(kinds := group_by_reason(report.bad)) == 1:
        (first, *_), place = (
            next(iter(kinds.values())),
            "if the records are right, the recipe or the model does not fit them",
        )
        raise DataError(f"{told}, all for one reason:\n  {first.location}: {first.reason}\n{place}")
    rule = {
        "skip": "and none is left",
        "fail": "and data.on_error is fail",
        None: f"above the {MAX_BAD_FRACTION:.0%} limit for skipping bad records",
    }[policy.on_error]
    file = re.sub(r"(:\d+|\[\d+\])$", "", report.bad[0].location) if report.bad else "FILE"
    known = " (with `--set model.path=FOLDER` also those that do not fit)"
    fit = known if any("data.max_length" in row.reason for row in report.bad) else ""
    skip = "" if policy.on_error == "skip" else ", or leave them out with `data.on_error: skip`"
    raise DataError(
        "\n".join(
            [
                f"{told}, {rule}:",
                *(f"  {line}" for line in format_bad_rows(report.bad)),
                f"list all with `dstrain data check {file} --task {policy.task}`{fit}{skip}",
            ]
        )
    )
