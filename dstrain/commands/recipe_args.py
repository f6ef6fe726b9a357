"""Find the recipe a command names, and make the paths in it absolute."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.config import Recipe, RunConfig, check_keys, read_recipe
from dstrain.config.schema import DatasetConfig, TrainDatasetConfig
from dstrain.data.paths import not_file_reason
from dstrain.data.sources.hub import is_hub_name
from dstrain.errors import Fault, RecipeError, UsageError, suggest_name
from dstrain.models.weights.files import find_init_files
from dstrain.tasks import fill_learning_rate

RECIPES_DIR = Path(__file__).parent.parent / "recipes"

SYSTEM_FOLDERS = frozenset(
    f"/{name}"
    for name in ("", "bin", "boot", "dev", "dev/shm", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc", "root",
                 "run", "sbin", "srv", "sys", "tmp", "usr", "usr/bin", "usr/lib", "usr/local", "var", "var/lib", "var/log",
                 "var/tmp")
)  # fmt: skip
"""Folders in which other programs keep what is theirs."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What the command line asks to train."""

    recipe: str | None = None
    task: str | None = None
    ds_config: str | None = None
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    resume: str = "auto"
    allowed_changes: Sequence[str] = ()

    def to_argv(self, run_dir: Path) -> list[str]:
        """The same wish as arguments of `dstrain`, for the workers."""
        words = ["train", *self.recipe_argv(), "--run-dir", str(run_dir), "--resume", self.resume]
        return words + [word for value in self.allowed_changes for word in ("--allow-change", value)]

    def recipe_argv(self) -> list[str]:
        """RECIPE, --task, --ds-config and --set."""
        path = find_recipe(self.recipe, bool(self.task or self.overrides))
        words = [str(path)] if path else []
        for option, value in (("--task", self.task), ("--ds-config", self.ds_config)):
            words += [option, value] if value else []
        return words + [word for value in self.overrides for word in ("--set", value)]


def list_packaged_recipes() -> list[str]:
    """Names of the recipes that come with dstrain."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def find_recipe(name: str | None, optional: bool) -> Path | None:
    """The file that RECIPE names: a path, a packaged name, or ./recipe.yaml. Raises RecipeError."""
    if name is None:
        default = Path("recipe.yaml")
        if default.is_file():
            return default.resolve()
        if optional:
            return None
        raise RecipeError(
            "no RECIPE was given and there is no ./recipe.yaml; give a file, the name of a packaged recipe "
            f"({', '.join(list_packaged_recipes())}), or --task and --set"
        )
    path = Path(name).expanduser()
    if _exists(path) and not path.is_dir():
        return path.resolve()
    if name in list_packaged_recipes():
        return RECIPES_DIR / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml") or "/" in name or _exists(path):
        if _exists(path):
            raise RecipeError(f"RECIPE {name}: is a folder; name the YAML file in it")
        raise RecipeError(f"RECIPE {name}: there is no such file (we are in {Path.cwd()}); check the path")
    raise RecipeError(
        f"RECIPE {name}: is neither a file nor a packaged recipe; {suggest_name(name, list_packaged_recipes())}"
    )


def resolve_recipe(request: TrainRequest) -> Recipe:
    """The wished recipe with --set, --task and --ds-config applied and its paths absolute. Raises RecipeError."""
    _check_dir_options(request)
    path = find_recipe(request.recipe, bool(request.task or request.overrides or request.ds_config))
    recipe = read_recipe(path, request.overrides, request.task, request.ds_config)
    check_run_dir(request, recipe.name)
    check_keys(request.allowed_changes, "--allow-change")
    config = resolve_paths(recipe.config, recipe.folder)
    if (
        config.optim.lr is None
        and (began_with := _read_learning_rate(get_run_dir(request, recipe.name), request.resume)) is not None
    ):
        config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": began_with})})
    return Recipe(fill_learning_rate(config), recipe.name, recipe.folder)


def get_run_dir(request: TrainRequest, name: str) -> Path:
    """--run-dir, or runs/NAME of the recipe: the same for the same command, so that it resumes."""
    # realpath, since Path.resolve raises RuntimeError on a loop of links: making the folder says what is wrong.
    return Path(os.path.realpath((request.run_dir or Path("runs") / name).expanduser()))


def _read_learning_rate(run_dir: Path, resume: str) -> float | None:
    """The learning rate that a run to go on with began with; None where there is none.

    A recipe that names no rate goes on with it, also where the task's own has changed since.
    """
    from dstrain.train.resume.recorded import ResumeOptions, find_resume_candidate, read_recorded_recipe

    try:
        start = find_resume_candidate(run_dir, ResumeOptions(resume))
        before = None if start is None else read_recorded_recipe(start)
        return None if before is None else before.optim.lr
    except UsageError:  # said in its own words when the run begins
        return None


def _check_dir_options(request: TrainRequest) -> None:
    """Raise UsageError for a --resume or --run-dir that can mean no folder."""
    known = ("auto", "never")
    if request.resume not in known and not _exists(Path(request.resume).expanduser()):
        hint = suggest_name(request.resume, known)
        mend = hint if hint.startswith("did you mean") else "write auto, never, or the folder of a run or a checkpoint"
        raise UsageError(f"--resume {request.resume}: is neither auto nor never, and there is no such folder; {mend}")
    if request.run_dir == Path():
        problem = "is empty or the working folder itself, and a run has a folder of its own"
        raise UsageError(f"--run-dir: {problem}; name one, such as --run-dir runs/first")


def check_run_dir(request: TrainRequest, name: str) -> None:
    """Raise UsageError for a run folder whose name cannot be written down, or in which a run would do harm."""
    folder = get_run_dir(request, name)
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        check_path_encoding(folder)
        shown = str(folder).encode(errors="surrogateescape").decode(errors="backslashreplace")
        problem = f"--run-dir {shown}: the path is not valid UTF-8, and logs and trackers hold it"
        raise UsageError(f"{problem}; rename the folder, or choose another") from None
    place = next((path for path in (folder, *folder.parents) if _exists(path)), folder)
    if _exists(place) and not place.is_dir():
        raise UsageError(f"--run-dir {folder}: cannot be written ({place} is not a folder); choose another folder")
    checkpoints = folder / "checkpoints"
    if (checkpoints.is_symlink() or _exists(checkpoints)) and not checkpoints.is_dir():
        problem = "is a link to a folder that is not there" if checkpoints.is_symlink() else "is not a folder"
        raise UsageError(f"{checkpoints}: {problem}; mount the disk, or move it away")
    if request.run_dir is None or any(_exists(folder / mark) for mark in ("environment.json", "checkpoints")):
        return
    problem = ""
    if str(folder) in SYSTEM_FOLDERS | {os.path.expanduser("~")} or str(folder).startswith(("/proc/", "/sys/")):
        problem = "is a folder of the system, and a run has a folder of its own"
    elif folder in (Path.cwd(), *Path.cwd().parents):
        problem = "is the working folder or above it, and a run has a folder of its own"
    elif found := next((name for name in ("recipe.yaml", "metrics.jsonl") if _has_content(folder / name)), None):
        problem = f"holds a {found} that is of no run, and a run would write over it"
    if problem:
        raise UsageError(f"--run-dir {request.run_dir}: {problem}; name another, such as --run-dir runs/first")


def check_path_encoding(path: Path) -> None:
    """Raise UsageError where it is Python that does not read paths as UTF-8, and not the path that is at fault."""
    encoding = sys.getfilesystemencoding()
    with contextlib.suppress(UnicodeDecodeError):
        if encoding.lower() != "utf-8" and os.fsencode(path).decode("utf-8"):
            problem = f"is UTF-8, and Python reads paths as {encoding} here"
            raise UsageError(f"{str(path)!a}: {problem}; set PYTHONUTF8=1, or LC_ALL=C.UTF-8")


def _has_content(path: Path) -> bool:
    """Whether it is there and not empty, as a start that was killed leaves it."""
    return _exists(path) and path.stat().st_size > 0


def resolve_paths(config: RunConfig, recipe_dir: Path) -> RunConfig:
    """Paths are looked up in the working directory, then beside the recipe. Raises RecipeError for missing data files."""
    values = config.model_dump()
    faults: list[Fault] = []
    for place, usual_split in _data_sources(values):
        found = find_path(place["path"], recipe_dir)
        if found is not None:
            faults += _hub_key_faults(place)
            place["path"] = str(found)
        elif is_hub_name(place["path"]):
            place["split"] = place["split"] or usual_split
        else:
            faults.append(_missing_file_fault(str(place["path"]), recipe_dir))
    for place, key in (
        (values["model"], "path"),
        (values["model"], "tokenizer"),
        (values["model"], "processor"),
        (values["model"], "chat_template"),
        (values, "task"),
        (values, "ds_config"),
        (values["options"], "ref_model"),
    ):
        text = place.get(key)
        found = find_path(text, recipe_dir) if isinstance(text, str) and text and _is_path(text, key) else None
        if found is not None:
            place[key] = str(found)
    faults += _resolve_init(values["model"], recipe_dir)
    if faults:
        raise RecipeError(faults)
    return RunConfig.model_validate(values)


def _resolve_init(model: dict[str, Any], recipe_dir: Path) -> list[Fault]:
    """Make model.init absolute; a fault where it names no weights."""
    if model["init"] is None:
        return []
    model["init"] = str(find_path(model["init"], recipe_dir) or model["init"])
    try:
        find_init_files(model["init"])
    except RecipeError as error:
        return [*error.faults]
    return []


def _data_sources(values: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """(block with a path, the split that is meant where it names none)."""
    data = values["data"]
    found = [(source, TrainDatasetConfig.default_split) for source in data["train"]]
    return found + ([(data["eval"], DatasetConfig.default_split)] if data["eval"] else [])


def _hub_key_faults(source: dict[str, Any]) -> list[Fault]:
    """A fault for each key that says nothing about a file."""
    found = [key for key in ("split", "name") if source[key]]
    return [Fault(key, f"works only for Hub datasets; {source['path']} is a local file", "remove it") for key in found]


def _is_path(text: str, key: str) -> bool:
    """Whether a word means a path. A folder beside the command is no task or preset, even where it is called so."""
    if "/" in text or text.endswith((".json", ".py", ".jinja")):
        return True
    return key not in ("task", "ds_config") and _exists(Path(text)) and Path(text).is_dir()


def find_path(text: str, recipe_dir: Path) -> Path | None:
    """The existing path that `text` means, absolute; None where there is none."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise RecipeError(f"{text}: begins with ~, and no home folder is known; write it out, or set HOME") from None
    return next((place.resolve() for place in (path, recipe_dir / path) if _exists(place)), None)


def _exists(path: Path) -> bool:
    """Whether the path exists; one too long for the system, or in a closed folder, does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _missing_file_fault(text: str, recipe_dir: Path) -> Fault:
    path = Path(text).expanduser()
    if why := next(filter(None, map(not_file_reason, (path, recipe_dir / path))), ""):
        return Fault(f"data file {text}", why, "name a .jsonl, .json or .parquet file")
    places = [os.path.realpath(path.parent)] if path.is_absolute() else [str(Path.cwd()), str(recipe_dir)]
    beside = [other.name for other in path.parent.glob("*")] if _exists(path.parent) else []
    hint = suggest_name(path.name, beside) if beside else ""
    mend = hint if hint.startswith("did you mean") else "check the path, or write org/name for a dataset on the hub"
    return Fault(f"data file {text}", f"there is no such file in {' or '.join(dict.fromkeys(places))}", mend)
