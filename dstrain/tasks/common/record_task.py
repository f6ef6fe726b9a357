"""Base class of tasks on records: files cut, mixed and split as the recipe's `data` says, encoded once and cached."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.config.schema import DatasetConfig, RunConfig, TrainDatasetConfig
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.records import Record, as_record, parse_record, try_parse
from dstrain.data.sources.base import ConcatSource, check_columns_exist, cut_source, list_unread
from dstrain.errors import BadRecord, DataError, Fault, TaskError, escape_controls
from dstrain.host_limits import count_available_cores
from dstrain.tasks.common.registry import digest_task_files, find_task
from dstrain.tasks.common.task import DATA_KEYS, Checks, Split, Task

if TYPE_CHECKING:
    import numpy as np

    from dstrain.data.dataset import Dataset
    from dstrain.data.prepare import ExampleSettings, PreparePolicy
    from dstrain.data.token_store import TokenStore


_TOKENIZER_KEYS = {
    "path",
    "config",
    "tokenizer",
    "processor",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_time",
}
"""Keys of `model` that an encoder may read."""


def policy_of(recipe: RunConfig) -> PreparePolicy:
    """Return the limit on bad records, the digest of the task's code, and one encoding process per available core."""
    from dstrain.data.prepare import PreparePolicy

    return PreparePolicy(
        task=recipe.task,
        code=digest_task_files(find_task(recipe.task)),
        on_error=recipe.data.on_error,
        processes=count_available_cores(),
    )


@dataclass(frozen=True, kw_only=True)
class RecordTask(Task):
    """A task on the records of `data.train` and `data.eval`, to which every key of `data` applies.

    With `encode_record` each record is encoded once for all processes of a host, and `collate` gets the columns that it
    returned, with `sample`, the index of the record. Without it `collate` gets the records as they are in the file; all of
    them are in memory.
    """

    data_keys: ClassVar[tuple[str, ...]] = DATA_KEYS
    token_columns: ClassVar[tuple[str, ...]] = ("input_ids",)
    """Columns that hold sequences of tokens, whose lengths sort samples into micro-batches and limit their tokens."""

    def encode_record(self, record: dict[str, Any]) -> Mapping[str, Any] | Iterable[Mapping[str, Any]]:
        """Return the columns of a record's example, or of each of several: numbers, and flat lists of numbers.

        Every example has the same columns. Integers stay integers, floats floats. Raises BadRecord for a record that
        cannot be used.
        """
        raise NotImplementedError

    def encode_key(self) -> dict[str, Any]:
        """Return what `encode_record` depends on, as values of JSON: its examples are computed again where this changes.

        By default the options, what `model` says of model and tokenizer, the limits of `data`, and the content of
        `self.tokenizer`, where the task has one of transformers.
        The code of the task is always part of the key. Add the digest of any other file that it reads.
        """
        recipe = self.recipe
        names = {field.name for field in fields(Task)}
        found: dict[str, Any] = {
            "options": {field.name: getattr(self, field.name) for field in fields(self) if field.name not in names},
            "model": recipe.model.model_dump(mode="json", include=_TOKENIZER_KEYS),
            "limits": [recipe.data.max_length, recipe.data.max_prompt_length],
        }
        if hasattr(tokenizer := getattr(self, "tokenizer", None), "special_tokens_map"):
            from dstrain.data.encoding.chat_template import tokenizer_fingerprint

            found["tokenizer"] = tokenizer_fingerprint(tokenizer)
        values: dict[str, Any] = json.loads(json.dumps(found, default=repr))  # noqa: TID251  of this process
        return values

    def split_group(self, record: dict[str, Any]) -> Any:
        """Return what keeps records together on one side of `data.eval_fraction`, such as a prompt; None: nothing does."""
        return None

    def describe_record(self, record: Mapping[str, Any], parsed: Any) -> list[str]:
        """Return lines on a record that a text of tokens does not show, such as a series, for `dstrain data show`.

        `parsed`: what `checks.parse_record` makes of it.
        """
        return []

    @property
    def describes_records(self) -> bool:
        return type(self).describe_record is not RecordTask.describe_record

    def show_records(self, limit: int) -> Iterator[str]:
        """Yield the first `limit` records of data.train in their readable form, then what was not read."""
        source, parse = self.open_sources(self.training_items), self.checks.parse_record
        assert parse is not None, "a task that describes records reads them"
        for row in source.bad_rows[:limit]:
            yield f"--- {row.location}: cannot be used: {row.reason}"
        for index in range(min(limit, len(source))):
            location = source.location(index)
            try:
                record = as_record(source[index])
                parsed = parse_record(parse, record)
                parsed = parsed.parsed if isinstance(parsed, RecordWithImages) else parsed
                lines = self.describe_record(record, parsed)
            except BadRecord as fault:
                yield f"--- {location}: cannot be used: {fault.reason}"
                continue
            yield "\n".join([f"--- {location}", *map(escape_controls, lines)])
        yield from (f"--- {sentence}" for sentence in list_unread(source))

    @property
    def encodes_records(self) -> bool:
        """True where examples are encoded and cached."""
        task_class = type(self)
        has_encode_record = task_class.encode_record is not RecordTask.encode_record
        return has_encode_record or task_class.build_store is not RecordTask.build_store

    @property
    def checks(self) -> Checks:
        has_encode_record = type(self).encode_record is not RecordTask.encode_record
        return Checks(parse_record=self._encode_to_list if has_encode_record else None)

    def examples(self, split: Split) -> Dataset | None:  # type: ignore[override]
        """Return the samples of a split, cut, mixed and split as `data` says; None where there is no held-out data."""
        from dstrain.data.prepare import NO_TRAIN_DATA, split_dataset

        data = self.recipe.data
        if split == "eval" and data.eval:
            return self._load([data.eval])  # a file of its own is not split: its whole content is held out
        if split == "eval" and not data.eval_fraction:
            return None
        if not (items := self.training_items):
            raise DataError(NO_TRAIN_DATA)
        dataset = self._load(items)
        if not data.eval_fraction:
            return dataset
        return split_dataset(dataset, self.choose_held_out(dataset))[split == "eval"]

    def _load(self, items: Sequence[DatasetConfig]) -> Any:
        """Return all samples of the files. Raises DataError."""
        import numpy as np

        from dstrain.data.prepare import get_source_sizes, load_into_memory
        from dstrain.data.token_store import TokenizedDataset

        source, weights = self.open_sources(items), tuple(getattr(item, "weight", 1.0) for item in items)
        if not self.encodes_records:
            return replace(load_into_memory(source, policy_of(self.recipe)), weights=weights)
        store = self.build_store(source)
        sizes = store.count_per_source(get_source_sizes(store, source))
        return TokenizedDataset(store, np.arange(len(store)), sizes, weights)

    def choose_held_out(self, dataset: Any) -> np.ndarray:
        """Return which samples of data.train `data.eval_fraction` holds out, (N,) bool. Raises DataError."""
        import numpy as np

        from dstrain.data.prepare import choose_held_out, hash_group

        fraction, seed = self.recipe.data.eval_fraction, self.recipe.seed
        if self.encodes_records:
            return choose_held_out(dataset.store.record_indices, dataset.store.groups, dataset.sizes, fraction, seed)
        get_group = self.example_settings.get_group or self.split_group
        groups = [hash_group(get_group(record), index) for index, record in enumerate(dataset.samples)]
        return choose_held_out(np.arange(len(groups)), np.array(groups), dataset.sizes, fraction, seed)

    def build_store(self, source: ConcatSource) -> TokenStore:
        """Return the source's examples, from the cache where they are in it. Raises DataError."""
        from dstrain.data.prepare import prepare

        key, settings = {"what": "records", **self.encode_key()}, self.example_settings
        store = prepare(source, self._encode_rows, key, policy_of(self.recipe), settings=settings)
        missing = [name for name in type(self).token_columns if name not in store.columns]
        if missing and len(store) and type(self).token_columns is not RecordTask.token_columns:
            problem = f"token_columns names '{missing[0]}', which no example has"
            raise TaskError(f"task {self.recipe.task}: {problem}; its columns are {', '.join(store.columns)}")
        return store

    @property
    def example_settings(self) -> ExampleSettings:
        """Roles of columns, and groups of records, for `prepare`."""
        from dstrain.data.prepare import ExampleSettings
        from dstrain.data.token_store import TokenColumns

        tokens = TokenColumns(self.token_columns)
        column = self.recipe.data.eval_group
        if column is None:
            return ExampleSettings(tokens=tokens, get_group=self.split_group, group_key="task")
        return ExampleSettings(tokens=tokens, get_group=self._get_group_column, group_key={"column": column})

    def _get_group_column(self, record: Mapping[str, Any]) -> Any:
        column = str(self.recipe.data.eval_group)
        if column in record:
            return record[column]
        # A question about a document has other keys than its record in the file.
        columns = record.columns if isinstance(record, Record) else record
        if column not in columns:
            problem = f"is '{column}', and a record has the columns {', '.join(columns)} only"
            raise DataError(Fault("data.eval_group", problem, "name a column that every record has"))
        if isinstance(record, Record):
            record.used[column] = column
        return columns[column]

    def _encode_rows(self, rows: list[tuple[int, dict[str, Any]]]) -> list[Any]:
        return [try_parse(self._encode_to_list, record) for _, record in rows]

    def _encode_to_list(self, record: dict[str, Any]) -> list[Mapping[str, Any] | BadRecord]:
        """Return the examples of a record. Raises BadRecord."""
        found: Any = self.encode_record(record)
        if isinstance(found, BadRecord):
            raise found
        examples = [found] if isinstance(found, Mapping) else [*found] if isinstance(found, Iterable) else [found]
        for example in examples:
            if not isinstance(example, Mapping | BadRecord):
                problem = f"encode_record returned {type(example).__name__} where it has to return a dict of columns"
                raise TaskError(f"task {self.recipe.task}: {problem}, or a list of such dicts; correct it")
        return examples

    def open_sources(self, items: Sequence[DatasetConfig]) -> ConcatSource:
        """Return the sources as one, each cut to `data.max_samples`."""
        opened = [self.open_source(item) for item in items]
        if any(isinstance(item, TrainDatasetConfig) for item in items):  # `evaluate` takes files of other forms too
            check_columns_exist(opened)
        sources = [self.wrap_source(source, item) for source, item in zip(opened, items, strict=True)]
        return ConcatSource([cut_source(source, self.recipe.data.max_samples) for source in sources])

    @property
    def training_items(self) -> Sequence[TrainDatasetConfig]:
        """The sources of training records."""
        return self.recipe.data.train

    def digest_records(self, items: Sequence[DatasetConfig]) -> str:
        return self.open_sources(items).digest
