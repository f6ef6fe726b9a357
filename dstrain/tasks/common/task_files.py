"""Files of a user's task: the task file and the modules beside it that it imports; their import, digest and copies."""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dstrain.cache import file_digest
from dstrain.errors import TaskError
from dstrain.files import atomic_write, remove_stale_partials
from dstrain.tasks.common.task import Task

TASK_FILE = "task.py"
"""Name of the copy of a task file in run folders and exports. It runs only where --task names it."""
_RESERVED_NAMES = (TASK_FILE, "checkpoints", "logs")
"""Names in a run folder that the modules beside a task file cannot have."""
_DSTRAIN = Path(__file__).resolve().parents[2]


def import_task_file(path: Path) -> ModuleType:
    """Return the module of a task file, imported once. Raises TaskError, and what the file raises.

    Modules beside the file can be imported from it, and from each other, as if its folder were in sys.path, but belong
    to it alone: those of another task's folder, and installed packages, may have the same names.
    """
    path = Path(os.path.realpath(path.expanduser()))
    if not path.is_file():
        raise TaskError(f"--task {path}: is not a file; give the path of a Python file that defines a task")
    if path.suffix != ".py":
        raise TaskError(f"--task {path}: is not a Python file; its name must end in .py")
    folder = _open_folder(path.parent)
    name = f"{folder.package}.{path.stem.replace('.', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = {*sys.modules}
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # The modules beside it too: they may be what the user mends.
        for one in [one for one in sys.modules if one.startswith(f"{folder.package}.") and one not in known]:
            del sys.modules[one]
        raise
    return module


class _TaskFolder:
    """A folder whose modules are those of a package with a name of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.package = f"dstrain_task_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        package = ModuleType(self.package, f"Modules of {path}.")
        package.__path__ = [str(path)]
        package.__spec__ = ModuleSpec(self.package, None, is_package=True)
        sys.modules[self.package] = package
        self._known: dict[str, bool] = {}

    def import_module(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as `__import__` does, a module of the folder before an installed one."""
        top = name.partition(".")[0]
        if level or not self._holds(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or ())
        return module if fromlist else sys.modules[f"{self.package}.{top}"]

    def _holds(self, name: str) -> bool:
        """Return whether the folder has a module of this name that a usual import would not find."""
        if name not in self._known:
            file = next((file for file in _module_files(self.path / name) if file.is_file()), None)
            try:
                usual = importlib.util.find_spec(name)
            except (ImportError, ValueError):
                usual = None
            is_other = (
                usual is None or usual.origin is None or Path(usual.origin).resolve() != (file and file.resolve())
            )
            self._known[name] = is_other if file else usual is None and (self.path / name).is_dir()
        return self._known[name]


@cache
def _open_folder(path: Path) -> _TaskFolder:
    folder = _FOLDERS[f"dstrain_task_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"] = _TaskFolder(path)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    return folder


_FOLDERS: dict[str, _TaskFolder] = {}


class _Loader(SourceFileLoader):
    """Loads a module that imports by `_TaskFolder.import_module`."""

    def exec_module(self, module: ModuleType) -> None:
        folder = _FOLDERS[module.__name__.partition(".")[0]]
        # Where a module's globals have `__builtins__`, its import statements call the `__import__` in it.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": folder.import_module}
        super().exec_module(module)


class _Finder:
    """Finds the modules of task folders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _FOLDERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def find_task_file(task: Task) -> Path | None:
    """Return the file of a task that does not come with dstrain, else None."""
    return _find_file(type(task))


def _find_file(task: type[Task]) -> Path | None:
    file = Path(inspect.getfile(task)).resolve()
    return None if _DSTRAIN in file.parents or not file.is_file() else file


def find_task_files(task: type[Task]) -> dict[str, Path]:
    """Return the files of a user's task by their names in a copy: the task file, and what it imports from its folder.

    Found by reading the import statements, also those inside functions: it does not depend on what has run. Empty for
    a task that comes with dstrain. Raises TaskError for a name that a copy cannot have.
    """
    first = _find_file(task)
    if first is None:
        return {}
    found, pending = {TASK_FILE: first}, [first]
    while pending:
        importing = pending.pop()
        for file in _iter_imported_files(importing, first.parent):
            name = file.relative_to(first.parent).as_posix()
            if found.get(name) == file:
                continue
            if file == first:  # a copy of it has another name
                problem = f"{importing.name} imports this file, which imports {importing.name}"
                raise TaskError(f"--task {first}: {problem}; move what both need into a third file")
            if name.partition("/")[0] in _RESERVED_NAMES:
                problem = f"imports {name} beside it, and a run folder, which gets a copy, uses that name"
                raise TaskError(f"--task {first}: {problem}; rename it")
            found[name] = file
            pending.append(file)
    return found


def digest_task_files(task: type[Task]) -> str | None:
    """Return a digest of the files of a user's task, the same for a copy; None for a task that comes with dstrain."""
    if not (files := find_task_files(task)):
        return None
    lines = [f"{name} {file_digest(file)}" for name, file in sorted(files.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def copy_task_files(task: Task, folder: Path) -> None:
    """Copy the files of a user's task into a folder, to load the folder later."""
    for name, source in reversed(find_task_files(type(task)).items()):
        copy = folder / name
        if source == copy.resolve():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_partials(copy)
        atomic_write(copy, source.read_bytes())


def _iter_imported_files(file: Path, root: Path) -> Iterator[Path]:
    """Yield the files in the folder `root` that a file's import statements name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names, start = list[str](), root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            names = [f"{base}{alias.name}" for alias in node.names]
            start = file.parents[node.level - 1] if node.level else root
        if start == root or root in start.parents:
            for name in names:
                yield from _iter_module_files(start, name.split("."))


def _iter_module_files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the file of the dotted module `parts` of a folder, and those of the packages that it is in."""
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        file = next((file for file in _module_files(place) if file.is_file()), None)
        if file is not None and _DSTRAIN not in file.resolve().parents:
            yield file
        if file is None and not place.is_dir():
            return


def _module_files(place: Path) -> tuple[Path, Path]:
    """Return the files that the module at a path may have; a package is found first."""
    return place / "__init__.py", place.with_name(f"{place.name}.py")
