"""`prepare` encodes the records of a source once into a token store; the datasets and the check that read them."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from dstrain.cache import cache_root
from dstrain.data.dataset import SequenceDataset
from dstrain.data.encoding.rendering import CUT_COLUMNS, PlaceholderExpansion
from dstrain.data.encoding.template_check import RENDERED, TEMPLATE_FIX
from dstrain.data.formats.images import RecordWithImages, has_null_image, read_with_images
from dstrain.data.formats.messages import IMAGE_KEYS
from dstrain.data.process_pool import EncodedChunk, map_chunks
from dstrain.data.records import (
    BadRow,
    ColumnReport,
    Encode,
    EncodeResult,
    Record,
    add_record,
    as_record,
    describe_columns,
    encode_valid,
    merge_reports,
    parse_record,
    try_parse,
)
from dstrain.data.sources.base import ConcatSource, DerivedSource, NotedSource, Source, list_names, list_unread
from dstrain.data.token_store import (
    GROUP,
    AlignedStore,
    BuildReport,
    TokenColumns,
    TokenizedDataset,
    TokenStore,
    describe_report,
    load_or_build_store,
)
from dstrain.data.vision.images import (
    UPRIGHT_TRANSPOSE,
    DeferredImage,
    ImageEntry,
    ImageIndexWriter,
    count_bits,
    count_frames,
    decode_frame,
    read_content,
    read_image,
    resolve_image,
    scale_to_8_bits,
)
from dstrain.data.vision.processor import VisionProcessor
from dstrain.errors import BadRecord, ColumnError, DataError, Fault, TaskError

if TYPE_CHECKING:
    from PIL.Image import Image


CACHE_FORMAT = 9
"""Part of every key. Increase it when the same data gives other examples, so that old caches are ignored."""
CHUNK_SIZE, IMAGE_CHUNK_SIZE, PARALLEL_CHUNK_SIZE = 1000, 200, 250
"""Records in memory at once: of text, with images (whose bytes they may hold), for one of several processes."""
MIN_PARALLEL_RECORDS = 4000
"""Number of records below which one process is as fast as several."""
MAX_IMAGE_THREADS = 8
"""Threads that decode at once, each with one image in memory; Pillow releases the GIL while it decodes."""
MAX_BAD_FRACTION = 0.01
"""Share of bad records that is skipped where `data.on_error` is not set."""
MAX_ROWS_PER_REASON = 10
"""Records listed for each reason."""
MAX_REASONS = 10
"""Reasons listed in an error message."""
_VARIABLE_WORD = re.compile(r"\('.*?'\)|\S*[\d/\\.]\S*")
"""What differs from record to record: values in brackets, numbers, keys, paths."""
EncodeItems = Callable[[list[Any]], Sequence[EncodeResult | list[EncodeResult]]]
"""Parsed records -> the example or the fault of each, or a list of them."""
EncodeParsed = Callable[[list[Any], PlaceholderExpansion | None], Sequence[EncodeResult]]
"""(parsed records, expansion of their image placeholders, None for text-only models) -> examples or faults."""


GetGroup = Callable[[dict[str, Any]], Any]
"""Record -> what it has in common with others, such as its prompt: values of JSON, or None for nothing."""


@dataclass(frozen=True)
class RecordEncode:
    """An `Encode` that parses records and encodes the valid ones of a chunk together."""

    parse: Callable[[dict[str, Any]], Any]
    """Raises BadRecord."""
    encode: EncodeItems

    def __call__(self, rows: list[tuple[int, dict[str, Any]]]) -> list[EncodeResult | list[EncodeResult]]:
        return encode_valid([try_parse(parse_record, self.parse, record) for _, record in rows], self.encode)


LoadedRecord = tuple[Any, list[ImageEntry], list[str]]
"""A parsed record, its images, and the image tokens of each as text."""


@dataclass(frozen=True)
class ImageRecordEncoder:
    """A vision processor, and the writer of the image index that a build fills."""

    vision_processor: VisionProcessor
    index_writer: ImageIndexWriter
    threads: int = 1

    @classmethod
    def create(cls, vision_processor: VisionProcessor, max_threads: int) -> ImageRecordEncoder:
        """Return an encoder with an empty image index; downscaled copies have a cache folder per image processor."""
        fingerprint = _downscale_fingerprint(vision_processor.hf_processor.image_processor)
        writer = ImageIndexWriter(vision_processor.downscale, cache_root() / "images" / fingerprint)
        return cls(vision_processor, writer, min(max_threads, MAX_IMAGE_THREADS))

    def make_encode(
        self, source: Source, parse: Callable[[Mapping[str, Any]], Any], encode: EncodeParsed
    ) -> tuple[Encode, Callable[[Path], None]]:
        """Return an `Encode` whose examples have a column `images`, positions in an image index, and its writer."""
        # One pool for all chunks: each thread copies the processor, which is slow.
        pool = ThreadPoolExecutor(self.threads)

        def load(row: tuple[int, dict[str, Any]]) -> LoadedRecord:
            """Parse a record and look up its images. Thread-safe. Raises BadRecord."""
            index, record = row
            parsed = parse_record(partial(read_with_images, read=parse), record)
            folder = source.get_base_dir(index)
            entries = [self.index_writer.get_entry(value, folder) for value in parsed.images]
            return parsed.parsed, entries, [self.vision_processor.get_image_text(entry.size) for entry in entries]

        def encode_loaded(items: list[LoadedRecord]) -> list[EncodeResult]:
            images = PlaceholderExpansion(self.vision_processor, [texts for _, _, texts in items])
            examples = encode([parsed for parsed, _, _ in items], images)
            # In the order of records, so that positions do not depend on the threads.
            return [self._add_positions(one, entries) for one, (_, entries, _) in zip(examples, items, strict=True)]

        def encode_rows(rows: list[tuple[int, dict[str, Any]]]) -> list[EncodeResult]:
            return encode_valid(list(pool.map(partial(try_parse, load), rows)), encode_loaded)

        def write_index(folder: Path) -> None:
            pool.shutdown()
            self.index_writer.write(folder, source.watched_files() if isinstance(source, DerivedSource) else ())

        return encode_rows, write_index

    def _add_positions(self, example: EncodeResult, entries: Sequence[ImageEntry]) -> EncodeResult:
        """Return an example, or those of a record, with the column `images`."""
        if isinstance(example, BadRecord):
            return example
        if isinstance(example, list):
            return [self._add_positions(one, entries) for one in example]
        return {**example, "images": [self.index_writer.assign_position(entry) for entry in entries]}


def read_minor_versions(*names: str) -> list[str]:
    """Return name, major and minor version of installed packages."""
    return [f"{name} {'.'.join(version(name).split('.')[:2])}" for name in names]


def _downscale_fingerprint(image_processor: Any) -> str:
    """Return a hash of everything that determines downscaled copies; the tokenizer is not part of it."""
    kind = type(image_processor)
    made_by = read_minor_versions("pillow", "transformers")
    parts = [f"{kind.__module__}.{kind.__qualname__}", image_processor.to_json_string(), *made_by]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class PreparePolicy:
    """Number of encoding processes, and what happens to bad records."""

    task: str
    """Task name, for the command in the error message."""
    on_error: str | None = None
    """skip: leave bad records out; fail: accept none; None: accept up to 1 %."""
    processes: int = 1
    code: str | None = None
    """Digest of the code of a user's task, part of the key of its examples; None for a packaged task."""


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """Roles of columns, and groups of records."""

    tokens: TokenColumns = field(default_factory=TokenColumns)
    counted: tuple[str, ...] = ()
    """Columns that are summed in the report, and not stored: 1 where a sequence was cut."""
    get_group: GetGroup | None = None
    """Records of equal groups stay on one side of a split; None: each record is alone."""
    group_key: Any = None
    """What `get_group` depends on, as values of JSON."""


PLAIN_COLUMNS = ExampleSettings()


def prepare(
    source: Source,
    encode: Encode,
    key: Mapping[str, Any],
    policy: PreparePolicy,
    settings: ExampleSettings = PLAIN_COLUMNS,
    write_extra: Callable[[Path], object] | None = None,
) -> TokenStore:
    """Return the store of a source's examples, built first where it is not in the cache.

    `key` holds everything that `encode` depends on; the data, the format and the code of a user's task are added to
    it. `on_error` is not part of the key: another value needs no new tokens. `write_extra` writes the image index of
    examples with images. Raises DataError for too many bad records, TaskError for a value that no column holds.
    """
    # A library that renders or tokenizes in another way gives other examples.
    libraries = read_minor_versions("jinja2", "tokenizers", "transformers")
    full = {"format": CACHE_FORMAT, "data": source.digest, "libraries": libraries, **key}
    full |= {"code": policy.code} if policy.code else {}
    full |= {"token_columns": asdict(settings.tokens)} if settings.tokens.names else {}
    full |= {"group": settings.group_key} if settings.get_group else {}

    def build(report: BuildReport) -> Iterator[list[Mapping[str, Any]]]:
        if write_extra is not None:
            return iter_encoded(source, encode, report, IMAGE_CHUNK_SIZE, settings=settings)
        return iter_encoded(source, encode, report, CHUNK_SIZE, policy.processes, settings)

    try:
        store = load_or_build_store(full, build, write_extra or (lambda folder: None))
    except ColumnError as fault:
        where = f"task {policy.task}: column '{fault.column}' of {source.location(fault.record)}"
        raise TaskError(f"{where} {fault.problem}") from fault
    store.report.rename(list_names(source))
    # Not part of the key: the files of a folder that are not read may change at any time.
    store.report.notes = [*store.report.notes, *list_unread(source)]
    check_bad_records(store.report, policy)
    return store


def iter_encoded(
    source: Source,
    encode: Encode,
    report: BuildReport,
    chunk_size: int = CHUNK_SIZE,
    processes: int = 1,
    settings: ExampleSettings = PLAIN_COLUMNS,
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the examples of all valid records, in chunks, with the record's index as `sample`.

    Fills in the report as it goes. Raises RunError where one of several processes is killed.
    """
    report.read = len(source) + len(source.bad_rows)
    report.sizes, report.names = list(getattr(source, "sizes", ())), list_names(source)
    report.bad.extend(source.bad_rows)
    # A daemon has no children.
    can_fork = not multiprocessing.current_process().daemon
    count = processes if can_fork and len(source) >= MIN_PARALLEL_RECORDS else 1
    size = min(chunk_size, PARALLEL_CHUNK_SIZE) if count > 1 else chunk_size
    spans = [(start, min(start + size, len(source))) for start in range(0, len(source), size)]
    if count > 1:
        pieces = map_chunks(partial(_encode_range, source, encode, settings), spans, processes)
    else:
        pieces = (_encode_range(source, encode, settings, *span) for span in spans)
    columns: dict[str, ColumnReport] = {}
    for piece in pieces:
        report.bad += piece.bad
        for name, cut in piece.cuts.items():
            report.cuts[name] = report.cuts.get(name, 0) + cut
        merge_reports(columns, piece.columns)
        report.kept += len(piece.examples)
        yield piece.examples
    report.columns = {file: found.to_json() for file, found in columns.items()}
    if isinstance(source, DerivedSource):
        report.notes = source.summarize()


def _encode_range(source: Source, encode: Encode, settings: ExampleSettings, start: int, stop: int) -> EncodedChunk:
    indices = range(start, stop)
    records = [try_parse(lambda at: as_record(source[at]), index) for index in indices]
    rows: list[tuple[int, dict[str, Any]] | BadRecord] = [
        one if isinstance(one, BadRecord) else (index, one) for index, one in zip(indices, records, strict=True)
    ]
    piece = EncodedChunk()
    for index, record, result in zip(indices, records, encode_valid(rows, encode), strict=True):
        examples, group = result if isinstance(result, list) else [result], dict[str, int]()
        for example in examples:
            if isinstance(example, BadRecord):
                piece.bad.append(BadRow(source.location(index), example.reason))
                continue
            if "sample" in example:
                raise ColumnError("sample", index, "has the name of the record's index; give the column another name")
            if settings.get_group and not group and not isinstance(record, BadRecord):
                group = {GROUP: hash_group(settings.get_group(record), index)}
            for name in settings.counted:
                piece.cuts[name] = piece.cuts.get(name, 0) + int(example.get(name, 0))
            kept = {name: value for name, value in example.items() if name not in settings.counted}
            piece.examples.append(kept | {"sample": index} | group)
        used = next((example for example in examples if not isinstance(example, BadRecord)), None)
        if used is not None and isinstance(record, Record):
            num_images = len(used.get("images", ()))
            add_record(piece.columns, source.location(index), record, num_images, source.get_base_dir(index))
    return piece


def hash_group(group: Any, index: int) -> int:
    """Return the number of a record's group, 63 bits; below 0 for a record without one, by its index."""
    if group is None:
        return -1 - index
    text = json.dumps(group, sort_keys=True, default=_describe_value)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def _describe_value(value: Any) -> str:
    """Return text that differs where values do that JSON does not have: bytes, arrays, dates."""
    content = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else None
    return repr(value) if content is None else hashlib.sha256(content).hexdigest()


def group_by_reason(rows: Sequence[BadRow]) -> dict[str, list[BadRow]]:
    """Return the rows by reason, ignoring numbers and paths in it; their order stays."""
    kinds: dict[str, list[BadRow]] = {}
    for row in rows:
        kinds.setdefault(_VARIABLE_WORD.sub("*", row.reason), []).append(row)
    return kinds


def format_bad_rows(
    rows: Sequence[BadRow], max_per_reason: int | None = MAX_ROWS_PER_REASON, max_reasons: int | None = MAX_REASONS
) -> list[str]:
    """Return a line for each row, shortened to the first rows of the first reasons.

    A line "… and N more" stands for the rest. None: no limit.
    """
    kinds = [*group_by_reason(rows).values()]
    if len(kinds[:max_reasons]) == len(kinds) and (
        max_per_reason is None or all(len(of_kind) <= max_per_reason for of_kind in kinds)
    ):
        return [f"{row.location}: {row.reason}" for row in rows]
    lines = []
    for of_kind in kinds[:max_reasons]:
        shown = of_kind[:max_per_reason]
        lines += [f"{row.location}: {row.reason}" for row in shown]
        if more := len(of_kind) - len(shown):
            lines.append(f"… and {more} more like {shown[-1].location}")
    if others := kinds[len(kinds[:max_reasons]) :]:
        count = len(others)
        lines.append(f"… and {sum(map(len, others))} more of {count} other kind{'s' * (count != 1)}")
    return lines


_LOST_TEXTS = {
    "system_lost": "their system text",
    "tools_lost": "their tools, calls or the results of calls",
    "turns_lost": "the text of another turn",
    "thoughts_lost": "thoughts",
}
_THOUGHTS_FIX = (
    "set its variables with model.chat_template_kwargs, write them into the text as <think>...</think>, or "
    + TEMPLATE_FIX
)
MAX_LISTED_RECORDS = 10
"""Skipped records that a command lists."""


def describe_examples(report: Mapping[str, Any]) -> list[str]:
    """Return lines on a dataset's report: columns, texts that were cut or dropped, notes, and the records that were skipped."""
    lines = [*describe_columns(report.get("columns", {})), describe_cuts(report)]
    if report.get("cuts"):
        lines += describe_template_counts(report)
    lines += report.get("notes", ())
    if skipped := report.get("skipped"):
        lines.append(f"{skipped} of {report['read']} records skipped:")
        lines += [f"  {record}" for record in report["skipped_records"][:MAX_LISTED_RECORDS]]
        lines += [f"  … and {skipped - MAX_LISTED_RECORDS} more"] if skipped > MAX_LISTED_RECORDS else []
    return [line for line in lines if line]


def describe_cuts(report: Mapping[str, Any]) -> str:
    """Return a sentence on the truncated samples of a report; empty if it does not count them."""
    cuts = report.get("cuts") or {}
    if not set(CUT_COLUMNS) <= cuts.keys():
        return ""
    answers, prompts, turns = (int(cuts[name]) for name in CUT_COLUMNS)
    total = f"of {report['kept']} samples"
    if not answers + prompts:
        return f"{total} none was cut to fit data.max_length"
    lost = f", {turns} of them inside of the last user turn (data.max_prompt_length)" if turns else ""
    return f"{total}, {answers} had an answer cut and {prompts} their prompt{lost or ', none its last user turn'}"


def describe_template_counts(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each kind of text that the chat template drops, and on texts that are taken as they stand."""
    cuts = report.get("cuts") or {}
    sentences = []
    if cuts.get(RENDERED):
        sentences.append(
            f"{cuts[RENDERED]} of {report['kept']} samples are texts that went through a chat template already: they are "
            "taken as they stand (data.rendered)"
        )
    for name, dropped in _LOST_TEXTS.items():
        if cuts.get(name):
            fix = _THOUGHTS_FIX if name == "thoughts_lost" else TEMPLATE_FIX
            sentences.append(f"the chat template drops {dropped} in {cuts[name]} of {report['kept']} samples ({fix})")
    return sentences


def check_bad_records(report: BuildReport, policy: PreparePolicy) -> None:
    """Raise DataError, with the first bad records of each reason, where there are more than `on_error` allows."""
    # Checked on a store from the cache too: `on_error` is not part of its key.
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
    # FILE:12 or FILE[12] -> FILE, for the command below.
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


HOLD_OUT_STREAM = 3
"""Stream of random numbers of held-out records."""
NO_TRAIN_DATA = Fault("data.train", "is not set", "write `data: {train: pairs.jsonl}`")


def align_store(store: TokenStore, other: TokenStore) -> tuple[AlignedStore, np.ndarray]:
    """Return the rows of `other` with the records of `store`'s rows, and the records that `other` lacks, (K,).

    Both are built from the same sources with one example for a record. The row of a missing record is 0.
    """
    wanted, known = store.record_indices, other.record_indices
    order = np.argsort(known, kind="stable")
    found = np.searchsorted(known, wanted, sorter=order).clip(max=max(len(known) - 1, 0))
    rows = order[found] if len(known) else np.zeros(len(wanted), dtype=np.int64)
    is_missing = known[rows] != wanted if len(known) else np.ones(len(wanted), dtype=bool)
    return AlignedStore(other, np.where(is_missing, 0, rows)), np.asarray(wanted[is_missing])


def get_source_sizes(store: TokenStore, source: ConcatSource) -> tuple[int, ...]:
    """Return the records of each source, from the store's report; a source is opened only where it lacks them."""
    return tuple(store.report.sizes) or source.sizes


def load_into_memory(source: ConcatSource, policy: PreparePolicy) -> SequenceDataset:
    """Return the records of a source as they are. Raises DataError for too many bad ones."""
    report = BuildReport(read=len(source) + len(source.bad_rows), bad=[*source.bad_rows])
    records, sizes, start = list[Any](), list[int](), 0
    for size in source.sizes:
        before = len(records)
        for index in range(start, start + size):
            try:
                records.append(dict(source[index]))
            except BadRecord as fault:
                report.bad.append(BadRow(source.location(index), fault.reason))
        sizes.append(len(records) - before)
        start += size
    report.kept = len(records)
    check_bad_records(report, policy)
    return SequenceDataset(records, tuple(sizes), report=describe_report(report))


DatasetT = TypeVar("DatasetT", TokenizedDataset, SequenceDataset)


def split_dataset(dataset: DatasetT, is_held_out: np.ndarray) -> tuple[DatasetT, DatasetT]:
    """Return the samples where `is_held_out`, (N,) bool, is false, and those where it is true."""
    held_out = dataset.select(is_held_out)
    return dataset.select(~is_held_out), replace(held_out, weights=(1.0,) * len(held_out.sizes))


def choose_held_out(
    records: np.ndarray,
    groups: np.ndarray | None,
    sizes: Sequence[int],
    fraction: float,
    seed: int,
    relation: str = "equal prompts",
) -> np.ndarray:
    """Return which rows are held out, (N,) bool: a fraction of each source's records, in an order that the seed chooses.

    `records`: (N,) the record of each row, ascending; `groups`: (N,) the group of each row's record. All rows of a
    record, and all records of a group, in whatever sources, are on one side. A group that would exceed the fraction is
    left to training, except that each source has a record held out. Raises DataError, which says by their `relation` why
    records belong together, where a source would have none left.
    """
    names, first, record_of_row = np.unique(records, return_index=True, return_inverse=True)
    group_names, group_of = np.unique(names if groups is None else groups[first], return_inverse=True)
    # Of each group: held out, left to training, or not decided by an earlier source.
    side = np.full(len(group_names), -1)
    for source, (start, stop) in enumerate(itertools.pairwise(np.cumsum((0, *sizes)))):
        own = group_of[np.unique(record_of_row[start:stop])]  # of each record of the source
        order = own[np.random.RandomState([seed, HOLD_OUT_STREAM, source]).permutation(len(own))]
        count, num_records = max(1, round(fraction * len(own))), np.bincount(own, minlength=len(side))
        held_out = int(num_records[side == 1].sum())
        for group in order.tolist():
            if held_out >= count:
                break
            if side[group] < 0 and held_out + num_records[group] <= count:
                side[group], held_out = 1, held_out + num_records[group]
        undecided = [group for group in dict.fromkeys(order.tolist()) if side[group] < 0]
        if not held_out and undecided:
            side[min(undecided, key=lambda group: int(num_records[group]))] = 1
        side[own] = np.where(side[own] < 0, 0, side[own])
        if len(own) and (side[own] == 1).all():
            same = "" if len(set(own.tolist())) > 1 or len(own) == 1 else f", which belong together ({relation})"
            problem = f"holds out all {len(own)} records of source {source + 1} of data.train{same}, and none is left to train on"
            raise DataError(Fault(f"data.eval_fraction {fraction:g}", problem, "lower it, or give data.eval a file"))
    return np.asarray(side[group_of[record_of_row]] == 1)


TEXT_ONLY_NOTE = "the record is used as text alone"
MIN_CONTRAST = 8
"""Grey levels of 255 below which an image of more than 8 bits is shown as black or grey, which its owner may not know."""
DARK_LEVEL = 64
"""Grey level of 255 up to which the brightest value of an image of 16 bits may come from 14 bits or fewer."""
MAX_PENDING_IMAGES = 256
"""Images that wait to be checked."""
_ROTATION_NAMES = {3: "rotated by 180°", 6: "rotated by 90°", 8: "rotated by 270°"}
ImageCheck = tuple[str | None, list[str]]
"""The fault of an image or None, and notes on conversions that it needs."""


@dataclass
class ValidationReport:
    """Result of checking a file."""

    read: int = 0
    """Number of records, including those that do not decode."""
    bad: list[BadRow] = field(default_factory=list)
    """Bad records in the file's order; a record with two bad images is listed twice."""
    warnings: list[BadRow] = field(default_factory=list)
    """Notes on images that are usable after a conversion."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> `ColumnReport.to_json` of its good records."""

    @property
    def num_valid(self) -> int:
        return self.read - len({row.location for row in self.bad})


def check_source(
    source: Source,
    parse: Callable[[dict[str, Any]], Any],
    threads: int = 1,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ValidationReport:
    """Parse every record, and check every image of a `RecordWithImages`.

    `parse` raises BadRecord for a bad record. A record whose image is null gets a note: it is used as text only.
    `show_progress(done, total)` is called for each record.
    """
    validation = ValidationReport(len(source) + len(source.bad_rows), [*source.bad_rows])
    shown: list[tuple[str, Future[ImageCheck]]] = []
    columns: dict[str, ColumnReport] = {}
    known: dict[Path | str | DeferredImage, Future[ImageCheck]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for index in range(len(source)):
            show_progress(index, len(source))
            where = source.location(index)
            try:
                record = as_record(source[index])
                item = parse_record(parse, record)
            except BadRecord as refused:
                validation.bad.append(BadRow(where, refused.reason))
                continue
            if isinstance(source, NotedSource):
                validation.warnings += [BadRow(where, note) for note in source.get_notes(index)]
            if isinstance(item, RecordWithImages) and not item.images:
                validation.warnings += [
                    BadRow(where, f"'{key}' is null: {TEXT_ONLY_NOTE}")
                    for key in IMAGE_KEYS
                    if has_null_image(record, key)
                ]
            num_images = len(item.images) if isinstance(item, RecordWithImages) else 0
            add_record(columns, where, record, num_images, source.get_base_dir(index))
            for value in item.images if isinstance(item, RecordWithImages) else ():
                shown.append((where, _submit_image(pool, value, source.get_base_dir(index), known)))
                if not len(shown) % MAX_PENDING_IMAGES:
                    shown[-1][1].result()  # bounds memory: earlier images are done by now, or nearly
        for where, asked in shown:
            fault, notes = asked.result()
            validation.bad += [BadRow(where, fault)] if fault else []
            validation.warnings += [BadRow(where, note) for note in notes]
    validation.columns = {file: report.to_json() for file, report in columns.items()}
    # Faults of images came after those of all records. Files of a folder have no number and no images.
    validation.bad.sort(key=lambda row: int((re.findall(r"[:\[](\d+)\]?$", row.location) or [0])[-1]))
    return validation


def _submit_image(
    pool: ThreadPoolExecutor, value: Any, folder: Path, submitted: dict[Path | str | DeferredImage, Future[ImageCheck]]
) -> Future[ImageCheck]:
    """Return the future check of an image; an image that many records name is read once."""
    try:
        source = value if isinstance(value, DeferredImage) else resolve_image(value, folder)
    except BadRecord as fault:
        told = Future[ImageCheck]()
        told.set_result((fault.reason, []))
        return told
    # Bytes in the record have no name: their hash is one.
    key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else source
    if key not in submitted:
        submitted[key] = pool.submit(_check_image, source)
    return submitted[key]


def _check_image(image: Path | bytes | DeferredImage) -> ImageCheck:
    try:
        source = image.get_file() if isinstance(image, DeferredImage) else image
        read_image(source)
        name = source.name if isinstance(source, Path) else "an image"
        return None, [f"{name}: {note}" for note in describe_conversions(source)]
    except BadRecord as fault:
        return fault.reason, []


def describe_conversions(source: Path | bytes) -> list[str]:
    """Return a sentence for each conversion that an image needs. Raises BadRecord as `read_image`."""
    content, name = read_content(source)
    image, orientation = decode_frame(content, name)
    found = []
    if orientation in UPRIGHT_TRANSPOSE:
        found.append(f"{_ROTATION_NAMES.get(orientation, 'mirrored')} according to EXIF: it is turned upright")
    if image.mode == "CMYK":
        found.append("CMYK: it is converted to RGB")
    if image.mode.startswith("I") or (image.format == "PNG" and content[24:25] == b"\x10"):
        bits = count_bits(image) if image.mode.startswith("I") else 16
        found.append(f"{bits} bits per channel: it is scaled to 8")
        if image.mode.startswith("I"):
            low, high = cast("tuple[int, int]", scale_to_8_bits(image, bits).getextrema())
            if high - low < MIN_CONTRAST:
                found.append(f"almost no contrast: its grey values are {low} to {high} of 255 after scaling")
        high = max(pair[1] for pair in _list_extrema(image, bits))
        if high <= DARK_LEVEL:
            share = f"its brightest value is {high / 255:.0%} of white"
            found.append(f"{share}: if it has 10 to 14 bits in 16, as of cameras and microscopes, scale it up before")
    if image.has_transparency_data and _has_alpha(image):
        found.append("partly transparent: the background becomes white")
    if (frames := count_frames(content, name)) > 1:
        many = f"{frames} pages" if image.format == "TIFF" else f"animated, {frames} frames"
        found.append(f"{many}: only the first is used")
    return found


def _list_extrema(image: Image, bits: int) -> list[tuple[int, int]]:
    """Return the least and the largest value of each colour after scaling to 8 bits."""
    grey = scale_to_8_bits(image, bits) if image.mode.startswith("I") else image
    colors = grey if grey.mode in ("L", "RGB") else grey.convert("RGB")
    extrema = cast("Any", colors.getextrema())
    return [extrema] if isinstance(extrema[0], int) else list(extrema)


def _has_alpha(image: Image) -> bool:
    if image.mode.startswith("I"):
        return True
    return any(image.convert("RGBA").getchannel("A").histogram()[:255])
