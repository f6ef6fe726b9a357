"""README: every path that it names exists; the tree of modules is current."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from dstrain.commands.plan import PlanRequest, make_report, report_as_json
from dstrain.tasks import builtin_tasks
from tests.workers import ROOT
from tools.make_tree import PACKAGE, PAGE, iter_entries, render_page

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), "run `python tools/make_tree.py`"


def test_the_tree_names_every_module() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sum(line.split()[0].endswith(".py") for line in iter_entries(PACKAGE)) == len(modules)


def test_every_path_in_the_readme_exists() -> None:
    named = re.findall(r"`((?:dstrain|tests|docs|tools|benchmarks|ds_configs|launchers)/[\w./-]+)`", README)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_no_packaged_task_is_listed_as_missing_and_each_is_in_the_table() -> None:
    missing = README.partition("\n## Not yet\n")[2].partition("\n## ")[0]
    assert missing
    assert not [name for name in builtin_tasks() if f"`{name}`" in missing]
    assert not [name for name in builtin_tasks() if f"\n| `{name}` |" not in README]


def test_every_extra_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert {name for name in extras if f"`.[{name}]`" in README} == extras


CARDS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in README.partition("\n## Memory of one GPU by model and method\n")[2].partition("```")[0].splitlines()
    if re.match(r"\| (Qwen|Llama)", line)
]
"""Rows of the table of predicted memory: the model, then six columns."""
LORA, QLORA = ("model.lora={}",), ("model.lora={}", "model.quantize=nf4", "optim.name=paged_adamw_8bit")
COLUMNS = (
    ((), 1, "zero2"), ((), 1, "zero2_offload"), ((), 8, "zero3"), (LORA, 1, "zero2"), (LORA, 8, "zero3"), (QLORA, 1, "zero2"),
)  # fmt: skip
"""--set values, GPUs and preset of each column."""


@pytest.mark.parametrize("row", CARDS, ids=lambda row: row[0])
def test_the_table_of_cards_is_what_the_planner_predicts(row: list[str]) -> None:
    for cell, (sets, gpus, preset) in zip(row[1:], COLUMNS, strict=True):
        request = PlanRequest(
            recipe=None, task="sft", ds_config=None, overrides=("data.train=train.jsonl", "batch.micro=1", *sets),
            gpu_memory=None, gpus=gpus, nodes=1, model_shape=row[0].lower(),
        )  # fmt: skip
        plans = {plan["preset"]: plan for plan in json.loads(report_as_json(make_report(request)))["presets"]}
        found = f"{plans[preset]['gpu_bytes'] / 2**30:.1f} GiB"
        if "offload" in preset:
            found += f" ({plans[preset]['host_bytes_per_node'] / 2**30:.0f})"
        assert cell == found, (preset, gpus, sets)


def test_the_table_of_cards_has_models_of_all_sizes() -> None:
    assert len(CARDS) == 7
