"""Layers: a module imports from its own package and from packages below; none in a circle; no torch before it is needed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = (
    ("errors",),
    ("files", "patching", "units", "resources", "process_setup", "device_copies"),
    ("distributed", "host_limits", "torchvision_fit"),
    ("batch", "cache", "schedule", "config", "preset"),
    ("data", "models", "report", "launch"),
    ("tasks", "ds_config"),
    ("task",),
    ("tasks.docqa", "tasks.protein", "tasks.temporal"),
    ("planner",),
    ("training",),
    ("verify",),
    ("commands",),
    ("cli",),
    ("__main__",),
    ("__init__",),
)
"""Modules and packages of dstrain, the lowest layer first."""
ROOMS = ("tasks.docqa", "tasks.protein", "tasks.temporal")
"""Tasks with readers and a model of their own, which import what a user's task file imports."""
PUBLIC = (
    "dstrain.task",
    "dstrain.tasks.common.forward",
    "dstrain.tasks.common.text",
    "dstrain.tasks.sft",
    "dstrain.tasks.vlm",
)
"""What a user's task file imports: the public module, packaged tasks to derive from, and functions that need torch."""
PARTS = (
    "dstrain.cache",
    "dstrain.config.schema",
    "dstrain.data",
    "dstrain.errors",
    "dstrain.files",
    "dstrain.models",
    "dstrain.patching",
    "dstrain.tasks.common.answers",
    "dstrain.tasks.common.generation",
    "dstrain.tasks.common.model_source",
    "dstrain.tasks.common.task",
)
"""Modules and packages that docs/tasks/own.md names for a task with readers, prompts or a model of its own."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "dstrain").rglob("*.py"))
    if not {"ds_configs", "launchers", "recipes"} & {*path.parts}
}
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of dstrain that a module imports: at its top, under TYPE_CHECKING, in functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield dotted if dotted in MODULES else str(node.module)


@cache
def all_imports() -> dict[str, set[str]]:
    """Module -> the modules that it imports; `from dstrain import __version__` needs nothing else of dstrain."""
    return {name: {*imports(path)} & MODULES.keys() - {name, "dstrain"} for name, path in MODULES.items()}


def top(module: str) -> str:
    """Return the package or module below dstrain that a module belongs to; the folder of a task is one of its own."""
    parts = f"{module}.__init__".split(".")
    own = ".".join(parts[1:3])
    return own if own in ROOMS else parts[1]


def test_a_module_imports_from_its_own_package_or_below() -> None:
    assert {top(module) for module in MODULES} == {*LEVELS}
    wrong = [
        f"{module} imports {other}"
        for module, others in all_imports().items()
        for other in sorted(others)
        if top(other) != top(module) and LEVELS[top(other)] >= LEVELS[top(module)]
    ]
    assert not wrong


def test_the_folder_of_a_task_imports_what_a_task_file_imports() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in all_imports().items()
        for other in sorted(others)
        if top(module) in ROOMS and top(other) != top(module) and other not in PUBLIC and not is_part(other)
    ]
    assert not wrong


def is_part(module: str) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in PARTS)


def test_the_page_on_tasks_names_what_they_may_import() -> None:
    page = (ROOT / "docs/tasks/own.md").read_text(encoding="utf-8")
    assert [name for name in PARTS if f"`{name}`" not in page] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = dict(all_imports())
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert not {module: sorted(needed & left.keys()) for module, needed in left.items()}


CALLS = """
import json, sys
from click.testing import CliRunner
from dstrain.cli import main
for line in json.loads(sys.argv[1]):
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 0, (line, result.output, result.exception)
    loaded = sorted({"torch", "deepspeed", "transformers", "pyarrow"} & set(sys.modules))
    assert not loaded, (line, loaded)
"""


def test_commands_that_do_not_compute_answer_without_torch(tmp_path: Path) -> None:
    lines = [
        ["--help"], ["train", "--help"], ["tasks"], ["tasks", "rm"], ["presets"], ["presets", "zero3_nvme"],
        ["recipes"], ["recipes", "demo-rm"], ["init", "rm"],
        ["report", "--help"], ["status", "--help"],
        ["train", "demo-rm", "--num-gpus", "2", "--dry-run"],
        ["train", "demo-rm", "--num-gpus", "2", "--dry-run", "--ds-config", "auto"],
        ["plan", "demo-rm", "--gpu-memory", "24GiB"], ["plan", "demo-sft", "--model-shape", "llama-3.1-70b", "--json"],
    ]  # fmt: skip
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(lines)], cwd=tmp_path, env=quiet, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_help_answers_at_once(tmp_path: Path) -> None:
    """Under 0.5 s, as the contract says, of processor time: the tests beside it take the cores too."""
    times: list[float] = []
    for _ in range(3):
        start = sum(os.times()[2:4])
        subprocess.run(
            [sys.executable, "-m", "dstrain", "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        times.append(sum(os.times()[2:4]) - start)
    assert min(times) < 0.5, times
