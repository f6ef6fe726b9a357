"""The house rules that a machine can hold: floors, circles, doors, sizes, docstrings, a control plane without torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "dstrain"
FLOORS = (
    ("errors",),
    ("files", "old_paths", "patching", "units", "resources", "process_setup"),
    ("distributed", "source_map", "host_memory"),
    ("batch", "cache", "schedule", "config", "preset"),
    ("data", "models", "report", "launch"),
    ("tasks",),
    ("task",),
    ("planner",),
    ("train",),
    ("commands",),
    ("cli",),
    ("__main__",),
    ("__init__",),
)
"""A module imports from floors below or from its own package; recipes hold no code."""
FLOORS_WITHIN = {
    "models": (
        ("gradient_checkpointing",),
        (
            "folder",
            "heads",
            "padding",
            "params",
            "patches",
            "protein",
            "router_loss",
        ),
        ("attention", "quantization", "weights"),
        (
            "adapters",
            "reward_model",
            "temporal",
        ),
        (
            "checks",
            "load",
        ),
        (
            "base_config",
            "processors",
        ),
    ),
    "launch": (
        (
            "heartbeat",
            "kernel_locks",
            "lease_file",
            "processes",
            "tee_log",
            "threads",
            "topology",
        ),
        (
            "command",
            "worker",
        ),
        (
            "exit_code",
            "lease",
            "rank_monitor",
        ),
        ("worker_group",),
        (
            "multihost",
            "supervise",
        ),
    ),
    "commands": (
        ("recipe", "checks", "data", "init", "job", "runs"),
        ("models", "lists", "plan", "train"),
        (
            "bench",
            "evaluate",
            "export",
            "prepare",
        ),
        ("generate", "selftest"),
    ),
    "data": (
        ("records", "dataset", "fingerprint", "limited_process", "rng"),
        ("sources", "loading"),
        ("series",),
        ("formats",),
        ("vision",),
        ("encoding", "documents", "structures"),
        ("cache",),
    ),
    "planner": (
        ("byte_tables", "cluster", "line", "run_settings", "shape"),
        ("families", "workload"),
        ("lines", "read_shape"),
        ("memory",),
        ("fixes",),
        ("choose", "show"),
        ("hardware",),
    ),
    "report": (
        ("allocation_errors", "flops", "memory", "meter", "run_log"),
        ("progress_line", "run_history", "wandb"),
        ("console", "sinks"),
        ("progress",),
        ("page",),
    ),
    "tasks": (
        ("data", "metrics"),
        ("common",),
        ("rm", "sft", "kto"),
        ("safety", "series"),
        ("dpo", "temporal"),
        ("vlm",),
        ("docqa", "protein"),
    ),
    "train": (
        ("state", "ds_config"),
        ("engine",),
        ("health", "build_model", "generate", "profiler"),
        ("list_parameters",),
        ("evaluate", "memory"),
        ("checkpoint", "monitors", "precompute_outputs", "rendezvous"),
        ("resume", "run", "run_report"),
        ("loop",),
        ("setup",),
    ),
}
"""Package -> floors of its modules and subpackages, checked as FLOORS are; `__init__` stands above all of them."""
DOORS = {
    "deepspeed": (
        "distributed/deepspeed_patches.py",
        "train/engine/deepspeed.py",
        "train/engine/inference.py",
        "train/engine/optimizers.py",
        "models/params/zero3.py",
    ),
    "torch.distributed": (
        "distributed/world.py",
        "distributed/store.py",
        "distributed/collective_log.py",
        "distributed/patches.py",
    ),
    "click": (
        "cli/__init__.py",
        "cli/command_group.py",
        "cli/completion.py",
        "cli/lists.py",
        "cli/options.py",
        "cli/runs.py",
        "cli/selftest.py",
    ),
    "tensorboard": ("report/sinks.py",),
    "torch.utils.tensorboard": ("report/sinks.py",),
    "wandb": ("report/wandb.py",),
    "datasets": ("data/sources/hub.py",),
    "pypdfium2": ("data/documents/pdfium.py",),
    "bm25s": ("data/documents/retrieval.py",),
    "bitsandbytes": ("models/quantization/library.py",),
    "gemmi": ("data/structures/reader.py",),
}
HEAVY = ("torch", "deepspeed", "transformers", "tokenizers", "peft", "accelerate")
CONTROL_PLANE = (
    "errors",
    "old_paths",
    "files",
    "patching",
    "units",
    "resources",
    "process_setup",
    "host_memory",
    "source_map",
    "batch",
    "distributed",
    "cache",
    "schedule",
    "config",
    "preset",
    "launch",
    "planner",
    "tasks",
    "task",
    "commands",
    "cli",
    "__main__",
    "__init__",
)
DATA_PLANE_FILES = (
    "tasks/common/forward.py",
    "tasks/common/dropout.py",
    "tasks/safety/losses.py",
    "tasks/safety/pair_loss.py",
    "commands/export.py",
    "commands/models/trained_model.py",
    "commands/evaluate.py",
)
"""Files of control-plane packages that may import torch at their top; they are imported inside functions only."""
EMPTY_WORDS = ("manager", "helper", "helpers", "utils", "util")

FILES = sorted(path for path in HOUSE.rglob("*.py") if not {"ds_configs", "launchers"} & set(path.parts))


def name(path: Path) -> str:
    return path.relative_to(HOUSE if path.is_relative_to(HOUSE) else ROOT).as_posix()


def part(path: Path) -> str:
    """The package below dstrain, or the module at its top: `tasks`, `batch`."""
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def floor_of(module: str) -> int | None:
    return next((floor for floor, modules in enumerate(FLOORS) if module in modules), None)


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import; `from a import b` counts as a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, no TYPE_CHECKING blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from top_level(child)


def attributes(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every use such as `torch.distributed.barrier`, which needs no import of its own."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.replace(".", "").isidentifier():
                yield dotted, node.lineno


def within(dotted: str, package: str) -> bool:
    return dotted == package or dotted.startswith(package + ".")


def test_every_module_has_its_floor() -> None:
    homeless = (
        {part(path) for path in FILES} - {module for floor in FLOORS for module in floor} - {"__init__", "recipes"}
    )
    assert not homeless, "say in FLOORS where they live"


def test_imports_go_down_or_stay_at_home() -> None:
    wrong = []
    for path in FILES:
        own, floor = part(path), floor_of(part(path))
        for dotted, line in imports(ast.walk(tree(path))):
            words = dotted.split(".")
            if words[0] != "dstrain" or len(words) < 2 or words[1] == own:
                continue
            other = floor_of(words[1])
            if other is not None and (floor is None or other >= floor):
                wrong.append(f"{name(path)}:{line} imports {dotted}, floor {floor} -> {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", FLOORS_WITHIN)
def test_imports_within_a_package_go_down(package: str) -> None:
    floors, folder, wrong = FLOORS_WITHIN[package], HOUSE / package, []
    level = {module: floor for floor, modules in enumerate(floors) for module in modules} | {"__init__": len(floors)}
    for path in FILES:
        if not path.is_relative_to(folder):
            continue
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        assert own in level, f"{name(path)}: give {own} a floor in FLOORS_WITHIN"
        for dotted, line in imports(ast.walk(tree(path))):
            prefix = f"dstrain.{package.replace('/', '.')}."
            other = dotted.removeprefix(prefix).split(".")[0] if dotted.startswith(prefix) else own
            if other != own and level.get(other, -1) >= level[own]:
                wrong.append(f"{name(path)}:{line} imports {dotted}, floor {level[own]} -> {level[other]}")
    assert not wrong, "\n".join(wrong)


def test_every_package_of_packages_has_floors() -> None:
    nested = {
        path.parent.parent.relative_to(HOUSE).as_posix() for path in FILES if len(path.relative_to(HOUSE).parts) > 2
    }
    assert nested - {"recipes"} == {*FLOORS_WITHIN}


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of dstrain that this one imports anywhere: at its top, under TYPE_CHECKING, in functions."""
    found = {dotted if dotted in modules else dotted.rpartition(".")[0] for dotted, _ in imports(ast.walk(tree(path)))}
    return found & modules.keys()


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    left = {module: imported_modules(path, modules) - {module} for module, path in modules.items()}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert not left, "a circle within: " + ", ".join(
        f"{module} -> {sorted(needed & left.keys())}" for module, needed in left.items()
    )


@cache
def used_names(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the (dotted name, line) of each import and each attribute of a module."""
    return *imports(ast.walk(tree(path))), *attributes(ast.walk(tree(path)))


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_one_door(library: str) -> None:
    wrong = [
        f"{name(path)}:{line} uses {dotted}"
        for path in FILES
        if name(path) not in DOORS[library]
        for dotted, line in used_names(path)
        if within(dotted, library)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_control_plane_imports_nothing_heavy() -> None:
    wrong = [
        f"{name(path)}:{line} imports {dotted} at its top"
        for path in FILES
        if part(path) in CONTROL_PLANE and name(path) not in DATA_PLANE_FILES
        for dotted, line in imports(top_level(tree(path)))
        if dotted.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_the_lowest_floors_are_those_that_coverage_measures() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["coverage"]["run"]
    measured = {
        pattern.removeprefix("dstrain/").removesuffix("/*").removesuffix(".py") for pattern in settings["include"]
    }
    assert measured == {module for floor in FLOORS[:4] for module in floor}


def test_every_module_says_what_it_is() -> None:
    silent = [name(path) for path in FILES if tree(path).body and not ast.get_docstring(tree(path))]
    assert not silent


def test_names_say_something() -> None:
    wrong = []
    for path in FILES:
        words = [(path.stem, 1)]
        words += [
            (node.name, node.lineno)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        wrong += [f"{name(path)}:{line} {word}" for word, line in words if word.lower().endswith(EMPTY_WORDS)]
    assert not wrong, "\n".join(wrong)


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


def test_the_control_plane_answers_without_torch(tmp_path: Path) -> None:
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
    """Under 0.5 s, as the contract says, in one of a few tries: the tests beside it take the cores too."""
    times: list[float] = []
    while len(times) < 3 or (min(times) >= 0.5 and len(times) < 20):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "dstrain", "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5, times
