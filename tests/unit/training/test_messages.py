"""What is said at the start and at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrain.commands.evaluate import show_metrics
from dstrain.report.run_log import RunLog
from dstrain.training.messages import format_last_eval, task_name


def test_the_last_evaluation_is_a_step_of_the_whole_run(tmp_path: Path) -> None:
    rows = [{"step": 350, "split": "eval", "loss": 0.5}, {"step": 360, "split": "train", "loss": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert format_last_eval(tmp_path, 40000) == "held-out: eval at step 350/40000  loss 0.5"


def test_a_task_file_is_called_by_its_name() -> None:
    assert (task_name("/home/me/tasks/contrast.py"), task_name("rm"), task_name("my.tasks")) == (
        "contrast.py",
        "rm",
        "my.tasks",
    )


def test_an_exported_folder_has_no_step() -> None:
    row = {"file": "x", "step": None, "loss": 0.5, "notes": ["a note"]}
    assert show_metrics(row).split() == ["file", "x", "loss", "0.5", "a", "note"]
    assert "step" in show_metrics({"step": 0, "notes": []})


@pytest.mark.parametrize(
    "row", ["{", "[" * 5000, '{"step": "x", "split": "eval"}', "7", '{"step": 8}', '{"split": "eval"}']
)
def test_a_damaged_row_does_not_fail_a_run_that_is_done(row: str, tmp_path: Path) -> None:
    told = '{"step": 350, "split": "eval", "loss": 0.5, "note": "a\u2028b"}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{told}{row}\n", encoding="utf-8")
    assert format_last_eval(tmp_path, 40000) == "held-out: eval at step 350/40000  loss 0.5  note a\u2028b"
    (tmp_path / "metrics.jsonl").unlink()
    assert format_last_eval(tmp_path, 40000) == ""


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunLog(tmp_path).warn("d\x1b]0;x\x07\x9b8m.jsonl has no images")
    assert capsys.readouterr().out == "warning: d\\x1b]0;x\\x07\\x9b8m.jsonl has no images\n"
