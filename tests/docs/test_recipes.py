"""docs/recipes.md: each recipe resolves, and needs the memory that the table says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from dstrain.cli import main
from dstrain.commands.plan import PlanRequest, make_report, report_as_json
from tests.vocabulary import write_jsonl
from tests.workers import ROOT

PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
RECIPES = {
    name: f"# {name}\n{rest}" for name, rest in re.findall(r"```yaml\n# ([\w-]+\.yaml)\n(.*?)```", PAGE, flags=re.S)
}
JOBS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| \d \|", line)]
"""Number, link, recipes and memory of each job."""
TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
RECORDS: dict[str, dict[str, Any]] = {
    "sft": {"messages": TURNS},
    "rm": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "dpo": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "vlm": {"image": "page.png", "question": "2+2?", "answer": "4"},
    "docqa": {"image": "page.png", "question": "2+2?", "answer": "4"},
}
"""A record for each task."""
SHAPES = {"projector-model": "llava-1.5-7b"}
"""Shapes of models that an earlier stage exports."""


def write_recipe(name: str, folder: Path) -> dict[str, Any]:
    """Write a recipe with the data files and the model folder that it names, and return its keys."""
    (folder / name).write_text(RECIPES[name], encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(RECIPES[name])
    for key in ("train", "eval"):
        if key in values["data"]:
            write_jsonl(folder / values["data"][key], [RECORDS[values["task"]]] * 200)
    Image.new("RGB", (32, 32)).save(folder / "page.png")
    return values


def test_the_page_has_the_recipes_of_five_jobs() -> None:
    assert [job[0] for job in JOBS] == ["1", "2", "3", "4", "5"]
    named = [name for job in JOBS for name in re.findall(r"`([\w-]+\.yaml)`", job[2])]
    assert named == list(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_the_page_resolves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = write_recipe(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "model.path=org/llava"] if values["model"]["path"] in SHAPES else []
    result = CliRunner().invoke(main, ["train", name, "--dry-run", *sets])
    assert result.exit_code == 0, result.output
    assert f"steps of {values['batch']['total']} samples" in result.output


def plan(name: str, folder: Path, gpus: int, nodes: int = 1) -> str:
    """Return the memory of one GPU that the planner predicts with the recipe's own preset."""
    values = write_recipe(name, folder)
    request = PlanRequest(
        recipe=str(folder / name), task=None, ds_config=None, overrides=(), gpu_memory=None, gpus=gpus, nodes=nodes,
        model_shape=SHAPES.get(values["model"]["path"]),
    )  # fmt: skip
    presets = json.loads(report_as_json(make_report(request)))["presets"]
    (gpu_bytes,) = [row["gpu_bytes"] for row in presets if row["preset"] == values.get("ds_config", "zero2")]
    return f"{gpu_bytes / 2**30:.1f}"


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0])
def test_the_memory_of_a_job_is_what_the_planner_predicts(job: list[str], tmp_path: Path) -> None:
    counts = [int(count) for count in re.findall(r"(\d) of \d+ GB", job[3])]
    predicted = re.findall(r"\d+\.\d", job[3])
    names = re.findall(r"`([\w-]+\.yaml)`", job[2])
    if len(counts) < len(names):
        counts *= len(names)
    assert predicted == [plan(name, tmp_path, count) for name, count in zip(names, counts, strict=True)]


def test_the_memory_on_two_hosts_is_what_the_planner_predicts(tmp_path: Path) -> None:
    (told,) = re.findall(r"hosts of 8 GPUs the predicted memory of a GPU is\s+([\d.]+) GiB", PAGE)
    assert told == plan("full.yaml", tmp_path, 8, nodes=2)
