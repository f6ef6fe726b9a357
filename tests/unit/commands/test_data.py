"""`dstrain data check`."""

from __future__ import annotations

from pathlib import Path

from dstrain.commands.data import check_file

OWN_TASK = """
from dataclasses import dataclass

from dstrain.data.sources.open import open_source
from dstrain.task import Batch, Loss, RecordTask


@dataclass(frozen=True, kw_only=True)
class Own(RecordTask):
    def open_source(self, item):
        return open_source(item, {"body": "text"})

    def encode_record(self, record):
        return {"ids": [*record["text"].encode()]}

    def collate(self, examples): ...

    def build_model(self): ...

    def loss(self, model, batch): ...
"""


def test_a_file_is_read_as_the_task_reads_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    report, _ = check_file(str(tmp_path / "a.jsonl"), str(tmp_path / "own.py"), [])
    assert (report.read, len(report.bad)) == (2, 0)
