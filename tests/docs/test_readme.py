"""README: the files, functions, extras and figures that it names are there."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from itertools import pairwise

import pytest

from dstrain.commands.plan import PlanRequest, make_report, report_as_json
from dstrain.config import RunConfig
from dstrain.tasks import builtin_tasks
from tests.test_layers import LEVELS
from tests.workers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_path_in_the_readme_exists() -> None:
    named = re.findall(r"`((?:dstrain|tests|docs|tools|benchmarks|ds_configs|launchers)/[\w./-]+)`", README)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def find_definitions(path: str) -> dict[str, str]:
    """Return the functions, classes and methods of a module: name -> which of the three."""
    kinds = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            kinds[node.name] = "function"
        elif isinstance(node, ast.ClassDef):
            kinds[node.name] = "class"
            methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            kinds.update({f"{node.name}.{method.name}": "method" for method in methods})
    return kinds


WHERE = README.partition("\n## Where things are\n")[2].partition("\n## ")[0]
NAMED = re.findall(r"`(dstrain/[\w/]+\.py)`, (function|class|method) `([\w.]+)`", WHERE)
"""(path, kind, name) of the code that the section names."""


@pytest.mark.parametrize(("path", "kind", "name"), NAMED)
def test_code_named_by_the_readme_is_what_it_says(path: str, kind: str, name: str) -> None:
    assert find_definitions(path).get(name) == kind


def test_the_readme_names_code() -> None:
    assert len(NAMED) == WHERE.count("function `") + WHERE.count("class `") + WHERE.count("method `") > 5


def test_the_packages_of_the_readme_are_all_and_in_the_order_of_their_imports() -> None:
    rows = re.findall(r"^\| (`.*?) \|", WHERE.partition("| package |")[2], flags=re.M)
    levels = [LEVELS[name] for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert levels == sorted(levels)
    packages = {path.parent.name for path in (ROOT / "dstrain").glob("*/__init__.py")}
    assert packages - {"recipes"} <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_no_packaged_task_is_listed_as_missing_and_each_is_in_the_table() -> None:
    missing = README.partition("\n## Not yet\n")[2].partition("\n## ")[0]
    assert missing
    assert not [name for name in builtin_tasks() if f"`{name}`" in missing]
    assert not [name for name in builtin_tasks() if f"\n| `{name}` |" not in README]


def test_every_extra_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert {name for name in extras if f"`.[{name}]`" in README} == extras


def cells(page: str, section: str, first: str) -> list[list[str]]:
    """Return the cells of the table rows of a section whose first cell matches."""
    behind = (ROOT / page).read_text(encoding="utf-8").partition(f"# {section}\n")[2]
    text = re.split(r"^##", behind, maxsplit=1, flags=re.M)[0]
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if re.match(rf"\| ({first})", line)
    ]


def plan(shape: str, preset: str, gpus: int, *sets: str) -> str:
    """Return the predicted memory of a GPU in GiB, and of the host where the preset keeps states there."""
    request = PlanRequest(
        recipe=None, task="sft", ds_config=None, overrides=("data.train=train.jsonl", *sets), gpu_memory=None,
        gpus=gpus, nodes=1, model_shape=shape.lower(),
    )  # fmt: skip
    plans = {plan["preset"]: plan for plan in json.loads(report_as_json(make_report(request)))["presets"]}
    host = f" ({plans[preset]['host_bytes_per_node'] / 2**30:.0f})" if "offload" in preset else ""
    return f"{plans[preset]['gpu_bytes'] / 2**30:.1f} GiB{host}"


CARDS = cells("README.md", "Memory of one GPU by model and method", "Qwen|Llama")
"""The model, then six columns."""
LORA, QLORA = ("model.lora={}",), ("model.lora={}", "model.quantize=nf4", "optim.name=paged_adamw_8bit")
COLUMNS = (
    ((), 1, "zero2"), ((), 1, "zero2_offload"), ((), 8, "zero3"), (LORA, 1, "zero2"), (LORA, 8, "zero3"), (QLORA, 1, "zero2"),
)  # fmt: skip
"""--set values, GPUs and preset of each column."""
LARGEST = cells("docs/memory.md", "What fits which card", "QLoRA|LoRA|full")
"""Training, GPUs and preset, then the largest model and its memory for each card."""


@pytest.mark.slow
@pytest.mark.parametrize("row", CARDS, ids=lambda row: row[0])
def test_the_table_of_cards_is_what_the_planner_predicts(row: list[str]) -> None:
    for cell, (sets, gpus, preset) in zip(row[1:], COLUMNS, strict=True):
        assert cell == plan(row[0], preset, gpus, "batch.micro=1", *sets), (preset, gpus, sets)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow if number > 1 else ()) for number, row in enumerate(LARGEST)],
    ids=lambda row: row[0],
)
def test_the_largest_models_need_what_the_planner_predicts(row: list[str]) -> None:
    training, count, preset = re.fullmatch(r"(\w+), (\d) GPUs?, `(\w+)`", row[0]).groups()  # type: ignore[union-attr]
    sets = {"QLoRA": QLORA, "LoRA": LORA, "full": ()}[training]
    for cell in {*row[1:]} - {"-"}:
        shape, _, memory = cell.partition(" ")
        assert memory == plan(shape, preset, int(count), "batch.micro=1", *sets).replace(" GiB", ""), cell


def test_the_first_results_need_the_memory_that_the_planner_predicts() -> None:
    section = README.partition("\n## First results\n")[2].partition("\n## ")[0]
    predicted = re.search(r"planner predicts ([\d.]+ GiB)", section)
    words = next(line for line in section.splitlines() if line.startswith("dstrain train --task sft")).split()
    sets = [word for flag, word in pairwise(words) if flag == "--set" and not word.startswith("model.path")]
    assert predicted is not None
    assert predicted[1] == plan("qwen2.5-0.5b", RunConfig().ds_config, 1, *sets, "data.train=train.jsonl")


def test_the_tables_have_models_of_all_sizes() -> None:
    assert (len(CARDS), len(LARGEST)) == (7, 5)
