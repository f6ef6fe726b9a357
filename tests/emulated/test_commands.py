"""Commands on an emulated device: a run that moves between CPU and device, its results, a small card and one without bf16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.emulated_runs import Cell, Server, read_losses, train_arguments, write_recipe
from tests.emulated.conftest import EmulatedRun

pytestmark = pytest.mark.cuda_emulated

T4 = {"EMU_CC": "75", "EMU_NAME": "Tesla T4", "EMU_MEMORY_MB": "15360"}


@pytest.fixture(scope="module")
def device() -> Iterator[Server]:
    server = Server({})
    yield server
    server.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Server]:
    server = Server(None)
    yield server
    server.close()


def check(server: Server, arguments: list[str], log: Path) -> str:
    """Run a command to its end with exit code 0; return what it printed."""
    codes = server.run(arguments, 1, log)
    printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    assert codes == [0], printed
    assert "cuda emulator:" not in printed
    return printed


def test_a_run_moves_between_cpu_and_device_and_is_used_there(device: Server, host: Server, tmp_path: Path) -> None:
    """Resumed on the other kind of device twice, with saves in the background; then each command on what it left."""
    changes = {"save.background": True, "save.every": 2, "optim.schedule": "constant", "optim.warmup": 0}
    cell = Cell("sft", "zero1", changes=changes)
    recipe = write_recipe(cell, tmp_path)
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    for number, (server, steps) in enumerate([(host, 2), (device, 4), (host, 6)]):
        arguments = [*train_arguments(cell, recipe, moved), "--set", f"steps={steps}", "--allow-change", "steps"]
        check(server, arguments, tmp_path / f"train-{number}.log")
    arguments = [*train_arguments(cell, recipe, whole), "--set", "steps=6"]
    check(host, arguments, tmp_path / "whole.log")
    assert read_losses(moved) == pytest.approx(read_losses(whole), rel=1e-5)

    data, exported = str(tmp_path / "eval.jsonl"), str(tmp_path / "exported")
    check(device, ["evaluate", str(moved), "--data", data], tmp_path / "evaluate.log")
    check(device, ["export", str(moved), "--to", exported], tmp_path / "export.log")
    check(device, ["score", exported, "--data", data, "--out", str(tmp_path / "scores.jsonl")], tmp_path / "score.log")
    generate = ["generate", exported, "--prompt", "open the lamp", "--max-new-tokens", "4"]
    assert check(device, generate, tmp_path / "generate.log")


def test_a_card_without_bfloat16_trains_in_fp16_with_loss_scaling(tmp_path: Path) -> None:
    server = Server(T4)
    cell = Cell("rm", "zero2_fp16", precision="fp16", changes={"steps": 8})
    printed = check(server, train_arguments(cell, write_recipe(cell, tmp_path), tmp_path / "run"), tmp_path / "log")
    server.close()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    skipped = [row["step"] for row in rows if row.get("skipped")]
    assert 1 in skipped, printed  # the scale of the loss begins at 2**16, which overflows
    assert len(read_losses(tmp_path / "run")) >= 4, printed


def test_a_batch_that_a_small_card_cannot_hold_ends_with_fixes(tmp_path: Path) -> None:
    server = Server({"EMU_MEMORY_MB": "600"})  # 100 MiB beside the context
    cell = Cell("rm", "zero2", changes={"model.config.hidden_size": 512, "model.config.intermediate_size": 8192})
    codes = server.run(train_arguments(cell, write_recipe(cell, tmp_path), tmp_path / "run"), 1, tmp_path / "log")
    server.close()
    printed = (tmp_path / "log").read_text()
    assert codes in ([1], [2]), printed
    assert "memory" in printed
    assert "Traceback" not in printed


def test_the_doctor_sees_the_card(emulated_run: EmulatedRun) -> None:
    done = emulated_run(["-m", "dstrain", "doctor"])
    assert done.returncode == 0, done.stdout
    assert "1 GPU (79.5 GiB free)" in done.stdout
