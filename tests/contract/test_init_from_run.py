"""A recipe that names a run starts from what an export of its checkpoint holds, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dstrain.commands.export import export_model
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.errors import RecipeError
from dstrain.tasks import make_task
from tests.contract.export_cases import make_run
from tests.contract.lora_cases import save_base
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke, write_recipe


def start(folder: Path, **model: Any) -> Any:
    """Return the resolved recipe of a run that starts with this model."""
    values = tiny_recipe("sft", folder) | {"model": {"config": None, **model}}
    return resolve_recipe(TrainRequest(recipe=str(write_recipe(folder, values)))).config


def weights(recipe: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in make_task(recipe).build_model().state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a policy in bf16; step 1 is its only checkpoint."""
    return make_run(tmp_path_factory.mktemp("it"), "sft", precision="bf16")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    save_base(str(folder / "base"), tiny_recipe("sft", folder))
    model = {"path": str(folder / "base"), "config": None, "lora": {"rank": 2}}
    return make_run(folder, "sft", {"model": model})


@pytest.mark.parametrize("which", ["", "@best", "@last", "@1"])
def test_a_run_is_what_its_export_is(which: str, run: Path, tmp_path: Path) -> None:
    export_model(run, "1", tmp_path / "out")
    recipe = start(tmp_path, path=f"{run}{which}")
    place = Path(recipe.model.path)
    assert place.parent == run / "exports"
    assert place.name.startswith("step-00000001-")
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (place / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file
    assert_equal(weights(recipe), weights(start(tmp_path, path=str(tmp_path / "out"))))


def test_the_export_is_written_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Path(start(tmp_path, path=str(run)).model.path)
    before = first.stat().st_mtime_ns
    capsys.readouterr()
    assert Path(start(tmp_path, path=f"{run}@last").model.path) == first
    assert first.stat().st_mtime_ns == before
    assert "exporting" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["run", "adapted"])
def test_a_plan_takes_the_sizes_of_a_run_and_exports_nothing(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "copy"))
    shutil.rmtree(run / "exports", ignore_errors=True)
    values = tiny_recipe("sft", tmp_path)
    totals = []
    for model in ({"config": values["model"]["config"]}, {"path": f"{run}@last"}):
        plan = invoke("plan", write_recipe(tmp_path, values | {"model": model}), "--gpu-memory", "24GiB", "--json")
        assert plan.exit_code == 0, plan.output
        totals.append(json.loads(plan.output)["presets"])
    assert totals[0] == totals[1]
    assert not (run / "exports").exists()


@pytest.mark.parametrize("new", [True, False], ids=["merged into the base", "trained on"])
def test_a_run_of_adapters_is_its_adapter_folder(new: bool, adapted: Path, tmp_path: Path) -> None:
    export_model(adapted, "1", tmp_path / "out")
    lora = {"lora": {"rank": 2, "create_new_adapter": new}}
    ours, theirs = (start(tmp_path, path=path, **lora) for path in (str(adapted), str(tmp_path / "out")))
    folders = [Path(recipe.model.path) for recipe in (ours, theirs)]
    files = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert_equal(*files)
    assert_equal(weights(ours), weights(theirs))


def test_init_from_a_run_of_adapters_takes_the_merged_weights(adapted: Path, run: Path, tmp_path: Path) -> None:
    export_model(adapted, "1", tmp_path / "out", merge_lora=True)
    config = tiny_recipe("sft", tmp_path)["model"]["config"]
    ours, theirs = (
        start(tmp_path, config=config, init=path) for path in (str(adapted), str(tmp_path / "out/model.safetensors"))
    )
    assert Path(ours.model.init).name.endswith("-merged")
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize(
    ("which", "told"),
    [("@7", "no complete checkpoint of this step; available: 1"), ("@next", "must be a step number, best or last")],
)
def test_a_checkpoint_that_is_not_there_is_refused(which: str, told: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"model.path: {run}{which} cannot be exported .*{told}"):
        start(tmp_path, path=f"{run}{which}")


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/recipe.yaml").write_text("task: sft")
    with pytest.raises(RecipeError, match=r"model\.path: .*has no complete checkpoint"):
        start(tmp_path, path=str(tmp_path / "run"))


def test_a_run_of_a_task_of_its_own_runs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "it", "sft")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    text = (run / "recipe.yaml").read_text().replace("task: sft", f"task: {tmp_path / 'own.py'}")
    (run / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match="code that only the folder names is not run"):
        start(tmp_path, path=str(run))
    assert not (tmp_path / "ran").exists()
