"""dstrain score: rewards of a reward model, of steps too, or log-probabilities of a policy, for each answer of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.run_job import Job
from dstrain.commands.trained_model import (
    ModelSelector,
    SavedModel,
    hash_weights,
    load_saved_model,
    quiet_libraries,
    resolve_data_path,
)
from dstrain.config import RunConfig
from dstrain.data.prepare import describe_examples
from dstrain.data.records import Record, try_parse
from dstrain.data.token_store import TokenizedDataset
from dstrain.ds_config import Device
from dstrain.errors import BadRecord, DataError, TaskError, UsageError
from dstrain.files import atomic_write
from dstrain.tasks.common.scoring import AnswerScores, make_scores
from dstrain.tasks.common.task import FrozenModel

if TYPE_CHECKING:
    import numpy as np

    from dstrain.distributed.world import World

STDOUT = "-"
"""Value of --out: write the records to standard output."""


@dataclass(frozen=True)
class PreparedScores:
    """A model and the answers that it scores."""

    saved_model: SavedModel
    task: AnswerScores
    answers: TokenizedDataset
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ScoreJob(Job):
    """A job that scores each answer of a file's records, in their order."""

    selector: ModelSelector
    data: str
    """A file, or a dataset on the hub."""
    out: str
    """File to write, or `-`."""

    def to_argv(self) -> list[str]:
        out = self.out if self.out == STDOUT else str(Path(self.out).expanduser().resolve())
        return ["score", *self.selector.to_argv(), "--data", resolve_data_path(self.data), "--out", out]

    def check_recipe(self) -> RunConfig:
        path = Path(self.out).expanduser()
        if self.out != STDOUT and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(
                f"--out {self.out}: is not a file in a folder that exists; name one, or - for standard output"
            )
        return self._find_task()[1].recipe

    def _find_task(self) -> tuple[SavedModel, AnswerScores]:
        found = self.selector.find_model(self.data)
        scores = make_scores(found.task)
        if scores is None:
            name = found.task.recipe.task
            raise TaskError(f"task {name}: has no answers to score; `dstrain evaluate` shows its metrics")
        return found, scores

    def prepare(self, world_size: int, device: Device) -> PreparedScores:
        quiet_libraries()
        found, task = self._find_task()
        found.check_loadable()
        found.check_forward(task, device)
        answers = task.examples("eval")
        if not answers:
            raise DataError(f"{self.data}: holds no answer to score")
        return PreparedScores(found, task, answers, found.build_ds_config(self.selector.ds_config, world_size, device))

    def cache_weight_hashes(self, prepared: PreparedScores) -> None:
        hash_weights(prepared.saved_model.task, include_base=True)

    def run(self, prepared: PreparedScores, world: World) -> dict[str, Any] | None:
        import numpy as np

        from dstrain.models.params import unwrap_peft
        from dstrain.training.precompute_outputs import ModelJob, compute_outputs

        saved, task = prepared.saved_model, prepared.task
        model = FrozenModel(
            config=task.recipe.model,
            build=lambda: unwrap_peft(load_saved_model(saved, prepared.ds_config, world)),
            outputs=task.outputs,
            key={"model": saved.weights_digest()},
        )
        job = ModelJob(
            name="answers", model=model, task=task, build=model.build, ds_config=prepared.ds_config,
            micro_batch_size=saved.micro_batch_size, world=world,
        )  # fmt: skip
        # Parts of 1024 answers are cached: the same command goes on after a kill.
        store = prepared.answers.store
        columns = compute_outputs(job, {store.folder: store})[store.folder]
        if world.rank > 0:
            return None
        rows = partial(_iter_rows, task, prepared.answers, columns)
        first = next(iter(columns))
        summary: dict[str, Any] = {
            "model": str(saved.folder),
            "step": saved.step,
            "answers": len(prepared.answers),
            f"mean_{first}": float(np.hstack([*columns[first]]).mean()),
            "notes": describe_examples(prepared.answers.summarize()),
        }
        if self.out == STDOUT:
            return {**summary, "rows": [*rows()]}
        lines = (json.dumps(row, ensure_ascii=False, default=lambda value: None) + "\n" for row in rows())
        atomic_write(Path(self.out), "".join(lines))
        return {**summary, "out": self.out}


def _iter_rows(
    task: AnswerScores, answers: TokenizedDataset, columns: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Yield each record of the file with the values of its answers, or with the reason why it has none."""
    assert task.recipe.data.eval is not None
    source = task.open_sources([task.recipe.data.eval])
    store, at = answers.store, 0
    for index in range(len(source)):
        record = source[index]
        row = dict(record.columns if isinstance(record, Record) else record)
        values: dict[int, dict[str, Any]] = {}
        while at < len(store) and store.record_indices[at] == index:
            values[int(store[at].get("number", 0))] = {name: column[at].tolist() for name, column in columns.items()}
            at += 1
        added = try_parse(task.read_columns, record, columns, values)
        yield {**row, "error": added.reason} if isinstance(added, BadRecord) else {**row, **added}


def show_scores(summary: Mapping[str, Any]) -> str:
    """Return the scored records as JSON lines, or a line about the file that was written."""
    if "rows" in summary:
        return "\n".join(json.dumps(row, ensure_ascii=False, default=lambda value: None) for row in summary["rows"])
    name = next(key for key in summary if key.startswith("mean_"))
    lines = [f"{summary['answers']} answers, {name.replace('_', ' ')} {summary[name]:.6g}: {summary['out']}"]
    return "\n".join([*lines, *summary["notes"]])
