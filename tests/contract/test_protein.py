"""Task protein from a folder of structures to an export: sharded, resumed at another world size, evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.export_cases import make_run
from tests.resume.test_tasks import rows, written
from tests.vocabulary import RUN, invoke, read_events
from tests.workers import Workers

pytest.importorskip("gemmi", reason='needs gemmi: pip install "dstrain[protein]"')
CASES = "tests.contract.export_cases:"


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_one_process_and_is_exported(tmp_path: Path, one: Workers, two: Workers) -> None:
    recipe = written(tmp_path, "protein, sharded")
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), crash_at=7)
    again = one(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["ds_config=zero1"])
    assert [(result["code"], len(result["samples"])) for result in again] == [(0, 4)], "the last four steps"
    assert [event["step"] for event in read_events(tmp_path / "run", "resharded")] == [4]
    (told,) = [row for row in rows(tmp_path / "run") if row["split"] == "eval" and row["step"] == 8]
    one(CASES + "export_only", run=str(tmp_path / "run"), to=str(tmp_path / "out"))
    for folder in ("run", "out"):
        found = one(CASES + "evaluate", folder=str(tmp_path / folder), data=str(tmp_path / "eval"))[0]
        for name in ("loss", "accuracy", "perplexity", "rmsd", "coordinate_loss"):
            assert found[name] == pytest.approx(told[name], rel=1e-5), (folder, name)
        assert 0 < found["unigram_accuracy"] < 1


def test_an_export_holds_weights_and_recipe_and_is_read_without_the_task_being_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "it", "protein")
    result = invoke("export", run, "--to", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "dstrain_recipe.yaml",
        "model.safetensors",
    ]


@pytest.mark.slow  # entries of the cache are read again: unit/data/test_structures
def test_prepare_parses_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    recipe = written(tmp_path, "protein")
    first = invoke("prepare", recipe)
    assert first.exit_code == 0, first.output
    assert "train: 64 samples" in first.output
    for file in (tmp_path / "train").iterdir():
        file.chmod(0)
    with monkeypatch.context() as patch:
        patch.setattr("dstrain.tasks.protein.read_chains", lambda path: pytest.fail(f"{path} is parsed again"))
        again = invoke("prepare", recipe)
    assert again.exit_code == 0, again.output
