"""A module of one's own leaves a run as model.safetensors and a copy of its task file, proven as any export is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dstrain.commands.export import export_model
from dstrain.commands.trained_model import find_saved_model, load_saved_model, load_trained_model
from dstrain.config.schema import RunConfig
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError, UsageError
from dstrain.tasks import make_task
from dstrain.tasks.common.registry import TASK_FILE, copy_task_files, find_task_file
from tests.adapters import adapter
from tests.contract.export_cases import OWN_MODULES, make_run
from tests.tiny import tiny_recipe

WHOLE: dict[str, Any] = {"zero_optimization": {"stage": 0}}
LORA = {"model": {"lora": {"rank": 2, "targets": ["inner"]}}}


def exported(tmp_path: Path, changes: dict[str, Any] | None = None, merge: bool = False) -> tuple[Path, Path]:
    """(the run, the exported folder)"""
    run = make_run(tmp_path / "it", OWN_MODULES, changes)
    proof = export_model(run, "last", tmp_path / "out", [f"task={tmp_path / 'it/own.py'}"], merge)
    assert proof.max_diff < 1e-5 if merge else proof.max_diff == 0
    return run, tmp_path / "out"


@pytest.mark.parametrize(("changes", "merge"), [(None, False), (LORA, True)], ids=["whole", "merged adapters"])
def test_an_exported_module_is_read_back_the_same(changes: dict[str, Any] | None, merge: bool, tmp_path: Path) -> None:
    run, out = exported(tmp_path, changes, merge)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "dstrain_recipe.yaml",
        "model.safetensors",
        "task.py",
    ]
    held = load_file(out / "model.safetensors")
    assert {"norm.running_mean", "norm.num_batches_tracked", "table", "out.weight"} <= held.keys()
    assert "again.weight" not in held  # one tensor with out.weight
    assert (out / "task.py").read_bytes() == (tmp_path / "it/own.py").read_bytes()
    before = load_trained_model(run, "last", [f"task={tmp_path / 'it/own.py'}"])
    found = find_saved_model(out, "last", task=str(out / TASK_FILE))
    after = load_saved_model(found, WHOLE, SingleProcessWorld()).eval()
    batch = found.task.collate(found.task.examples("eval") or [])
    with torch.no_grad():
        assert torch.allclose(
            before.task.export.outputs(before.model, batch), found.task.export.outputs(after, batch), rtol=1e-6
        )
    assert "table" in dict(after.named_buffers())


def test_a_modules_code_runs_only_if_the_user_names_it(tmp_path: Path) -> None:
    _, out = exported(tmp_path)
    with pytest.raises(UsageError, match=r"names code of its own .*add --task .*out/task\.py"):
        find_saved_model(out, "last")


def test_adapters_of_a_module_are_merged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a custom module.*add --merge-lora"):
        exported(tmp_path, LORA)


def test_what_is_not_the_run_s_is_refused(tmp_path: Path) -> None:
    _, out = exported(tmp_path)
    file = out / "model.safetensors"
    held = load_file(file)
    for spoilt, wanted in (
        (
            {name: value for name, value in held.items() if name != "table"},
            "missing keys: table; unexpected keys: none",
        ),
        ({**held, "more": torch.zeros(1)}, "missing keys: none; unexpected keys: more"),
        ({**held, "table": torch.zeros(3)}, r"table is \(3,\) in the file and \(2, 3\)"),
    ):
        save_file(spoilt, file)
        with pytest.raises(CheckpointError, match=wanted):
            load_saved_model(find_saved_model(out, "last", task=str(out / TASK_FILE)), WHOLE, SingleProcessWorld())


def test_a_task_file_is_kept_beside_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "it", OWN_MODULES)
    task = find_saved_model(run, "last", task=str(tmp_path / "it/own.py")).task
    assert find_task_file(type(task)) == (tmp_path / "it/own.py").resolve()
    copy_task_files(task, run)
    assert (run / TASK_FILE).read_bytes() == Path(OWN_MODULES).read_bytes()
    (tmp_path / "it/own.py").unlink()
    with pytest.raises(UsageError, match=r"add --task .*run/task\.py"):  # the file moved: its copy is named
        find_saved_model(run, "last")
    again = load_trained_model(run, "last", task=str(run / TASK_FILE))
    copy_task_files(again.task, run)  # from itself: nothing to do
    assert (run / TASK_FILE).read_bytes() == Path(OWN_MODULES).read_bytes()


def test_packaged_tasks_leave_no_copy(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(tiny_recipe("rm", tmp_path)))
    assert find_task_file(type(task)) is None
    copy_task_files(task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_hub_base_of_an_adapter_is_not_fetched_because_a_run_folder_says_so(tmp_path: Path) -> None:
    at = adapter(tmp_path)
    task: Any = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path)))
    task.tokenizer.save_pretrained(str(at))
    run = make_run(tmp_path / "it", "sft", {"model": {"config": None, "path": str(at)}})
    assert find_saved_model(run, "last").task.recipe.model.path == str(at)
    file = at / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "org/not-there"}))
    with pytest.raises(UsageError, match=r"model\.path: names 'org/not-there' on the hub"):
        find_saved_model(run, "last")
