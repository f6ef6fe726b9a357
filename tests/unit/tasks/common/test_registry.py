"""A task of several files: imported, digested and copied together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import TaskError, find_user_frame
from dstrain.tasks import builtin_tasks, find_task
from dstrain.tasks.common.registry import check_task_class, copy_task_files, digest_task_files, find_task_files

TASK = """
{imports}
from dataclasses import dataclass
from dstrain.task import Task

@dataclass(frozen=True, kw_only=True)
class Own(Task):
    def examples(self, split):
        {body}
    def collate(self, examples): ...
    def build_model(self): ...
    def loss(self, model, batch): ...
"""


def write(folder: Path, imports: str, body: str = "return value()", **modules: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(TASK.format(imports=imports, body=body))
    for name, code in modules.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return str(folder / "own.py")


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    """Each test imports in a process of its own, as far as modules and sys.path tell."""
    yield
    forget_modules()


def forget_modules() -> None:
    sys.path[:] = [folder for folder in sys.path if "/pytest-" not in folder]
    for name, module in [*sys.modules.items()]:
        if "/pytest-" in str(getattr(module, "__file__", None) or getattr(module, "__path__", "")):
            del sys.modules[name]


def run(path: str | Path) -> Any:
    task: Any = find_task(str(path))
    return task().examples("train")


NUMBER = "def value():\n    return {}\n"


@pytest.mark.parametrize(
    ("imports", "body", "modules"),
    [
        ("from net import value", "return value()", {"net": NUMBER.format(7)}),
        ("import net", "return net.value()", {"net": NUMBER.format(7)}),
        ("import net as other", "return other.value()", {"net": NUMBER.format(7)}),
        ("", "from net import value\n        return value()", {"net": NUMBER.format(7)}),
        ("from net import *", "return value()", {"net": NUMBER.format(7)}),
        ("from net import value", "return value()", {"net": "from deep import value", "deep": NUMBER.format(7)}),
        ("from net import value", "return value()", {"net": "def value():\n    import deep\n    return deep.seven", "deep": "seven = 7"}),
        ("from parts.net import value", "return value()", {"parts/__init__": "", "parts/net": "from .deep import value", "parts/deep": NUMBER.format(7)}),
        ("import parts.net", "return parts.net.value()", {"parts/__init__": "", "parts/net": NUMBER.format(7)}),
        ("import parts.net as net", "return net.value()", {"parts/__init__": "", "parts/net": NUMBER.format(7)}),
        ("from parts import net", "return net.value()", {"parts/__init__": "", "parts/net": NUMBER.format(7)}),
        ("from parts.net import value", "return value()", {"parts/net": NUMBER.format(7)}),
    ],
)  # fmt: skip
def test_modules_beside_a_task_file_are_imported_digested_and_copied(
    tmp_path: Path, imports: str, body: str, modules: dict[str, str]
) -> None:
    path = write(tmp_path / "here", imports, body, **modules)
    task: Any = find_task(path)
    assert task().examples("train") == 7
    copy_task_files(task(), tmp_path / "run")
    copied = {file.relative_to(tmp_path / "run").as_posix() for file in (tmp_path / "run").rglob("*.py")}
    assert copied == {"task.py", *(f"{name}.py" for name in modules)}
    copy: Any = find_task(str(tmp_path / "run/task.py"))
    assert copy().examples("train") == 7
    assert digest_task_files(copy) == digest_task_files(task)


def test_another_folders_module_of_the_same_name_is_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(n), "import net", "return net.value()", net=NUMBER.format(n)) for n in range(2)]
    assert run(paths[0]) == 0
    with pytest.raises(TaskError, match=r"imports net.py beside it, and there is a module net as .*/0/net.py; rename"):
        find_task(paths[1])


@pytest.mark.parametrize("name", ["sys", "queue", "datasets", "tokenizers", "yaml"])
def test_a_module_called_like_an_installed_one_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, f"import {name}", f"return {name}.value()", **{name: NUMBER.format(3)})
    with pytest.raises(TaskError, match=rf"imports {name}.py beside it, and there is a module {name} .*; rename yours"):
        find_task(path)
    assert str(tmp_path) not in sys.path


def test_the_folder_comes_after_installed_packages_once_the_file_is_imported(tmp_path: Path) -> None:
    run(write(tmp_path, "from net import value", net=NUMBER.format(7)))
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_a_folder_of_data_hides_no_installed_package(tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()
    assert run(write(tmp_path, "import yaml", "return yaml.safe_load('7')")) == 7


def test_an_edit_of_any_file_changes_the_digest(tmp_path: Path) -> None:
    def digest(number: int, other: str = "") -> str | None:
        folder = tmp_path / f"{number}{other}"
        path = write(folder, "from net import value", net="from deep import value", deep=NUMBER.format(number))
        (folder / "unused.py").write_text(other)
        forget_modules()
        return digest_task_files(find_task(path))

    assert digest(1) == digest(1, "x = 1") != digest(2)


def test_packaged_tasks_have_no_files_of_the_user() -> None:
    assert (find_task_files(find_task("dpo")), digest_task_files(find_task("dpo"))) == ({}, None)


def test_dstrain_beside_a_task_file_is_not_one_of_its_modules(tmp_path: Path) -> None:
    (tmp_path / "dstrain").symlink_to(Path(find_task.__code__.co_filename).parents[2])
    task = find_task(write(tmp_path, "from dstrain.task import Task", "return 7"))
    assert [*find_task_files(task)] == ["task.py"]


def test_a_module_with_a_name_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    task: Any = find_task(write(tmp_path, "from task import value", task=NUMBER.format(1)))
    with pytest.raises(
        TaskError, match=r"imports task.py beside it, and a run folder, which gets a copy, uses that name; rename it"
    ):
        find_task_files(task)


def test_a_module_that_imports_the_task_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "from net import value", net=f"import own\n{NUMBER.format(1)}")
    with pytest.raises(
        TaskError, match=r"net.py imports this file, which imports net.py; move what both need into a third"
    ):
        find_task(path)


def test_a_module_that_fails_is_named_with_its_line_and_can_be_mended(tmp_path: Path) -> None:
    path = write(tmp_path, "from net import value", net="x = 1\ny = x / 0\n")
    with pytest.raises(TaskError, match=r"cannot be imported \(ZeroDivisionError: .* \(in <module>, .*/net.py:2\)\)"):
        find_task(path)
    (tmp_path / "net.py").write_text("def value():\n    return 11\n")
    assert run(path) == 11


def test_a_frame_of_a_module_beside_the_task_is_the_users(tmp_path: Path) -> None:
    path = write(tmp_path, "from net import value", net="import json\ndef value():\n    return json.loads('{')\n")
    with pytest.raises(ValueError, match="Expecting") as caught:
        run(path)
    frame = find_user_frame(caught.value)
    assert frame is not None
    assert (Path(frame.filename).name, frame.lineno, frame.name) == ("net.py", 3, "value")


def test_the_public_module_imports_no_torch_and_has_every_name() -> None:
    code = "import sys, dstrain.task as t; assert all(hasattr(t, n) for n in t.__all__); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("name", builtin_tasks())
def test_packaged_tasks_keep_the_rules_of_a_users_task(name: str) -> None:
    """A start does not check them again."""
    check_task_class(name, find_task(name))
