"""From the arguments of a command to a recipe: find it, read it, apply options and overrides."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from dstrain.cache import file_digest
from dstrain.config import Recipe, RunConfig, check_keys, read_recipe
from dstrain.config.aliases import RECIPES_DIR
from dstrain.config.schema import DatasetConfig, TrainDatasetConfig
from dstrain.data.sources.hub import is_hub_name
from dstrain.errors import Fault, RecipeError, UsageError, one_line, set_key_locations, suggest_name
from dstrain.files import check_path_encoding, find_path, find_pattern, not_file_reason, open_for_writing, path_exists
from dstrain.models.weights import find_init_files
from dstrain.process_setup import log_stderr
from dstrain.tasks import TaskOptions, fill_defaults, find_task


def list_builtin_recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def find_recipe(name: str | None, optional: bool) -> Path | None:
    """Return the file that RECIPE names: a path, a packaged name, or ./recipe.yaml. Raises RecipeError.

    With `optional`, return None if there is no RECIPE and no ./recipe.yaml.
    """
    if name is None:
        default = Path("recipe.yaml")
        if default.is_file():
            return default.resolve()
        if optional:
            return None
        raise RecipeError(
            "no RECIPE was given and there is no ./recipe.yaml; give a file, the name of a packaged recipe "
            f"({', '.join(list_builtin_recipes())}), or --task and --set"
        )
    path = Path(name).expanduser()
    if path_exists(path) and not path.is_dir():
        return path.resolve()
    if name in list_builtin_recipes():
        return RECIPES_DIR / f"{name}.yaml"
    if path_exists(path):
        fault = "is a folder; give the YAML file in it"
    elif "=" in name:
        fault = f"is a value of a key; write --set {shlex.quote(name)}"
    elif path.suffix in (".yaml", ".yml") or "/" in name:
        fault = f"there is no such file (working directory: {Path.cwd()}); check the path"
    else:
        fault = f"is neither a file nor a packaged recipe; {suggest_name(name, list_builtin_recipes())}"
    raise RecipeError(f"RECIPE {one_line(name)}: {fault}")


SYSTEM_FOLDERS = frozenset(
    f"/{name}"
    for name in ("", "bin", "boot", "dev", "dev/shm", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc", "root",
                 "run", "sbin", "srv", "sys", "tmp", "usr", "usr/bin", "usr/lib", "usr/local", "var", "var/lib", "var/log",
                 "var/tmp")
)  # fmt: skip
"""System folders, which are refused as run folders."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """Options of `dstrain train` that select recipe, run folder and resume."""

    recipe: str | None = None
    task: str | None = None
    ds_config: str | None = None
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    resume: str = "auto"
    allowed_changes: Sequence[str] = ()

    def to_argv(self, run_dir: Path) -> list[str]:
        """Return the same request as arguments of `dstrain`, for the workers."""
        words = ["train", *self.recipe_argv(), "--run-dir", str(run_dir), "--resume", self.resume]
        return words + [word for value in self.allowed_changes for word in ("--allow-change", value)]

    def recipe_argv(self) -> list[str]:
        """Return RECIPE, --task, --ds-config and --set as arguments."""
        path = find_recipe(self.recipe, bool(self.task or self.overrides))
        words = [str(path)] if path else []
        for option, value in (("--task", self.task), ("--ds-config", self.ds_config)):
            words += [option, value] if value else []
        return words + [word for value in self.overrides for word in ("--set", value)]


def resolve_recipe(request: TrainRequest) -> Recipe:
    """Return the recipe with --set, --task and --ds-config applied and its paths absolute. Raises RecipeError."""
    _check_dir_options(request)
    path = find_recipe(request.recipe, bool(request.task or request.overrides or request.ds_config))
    recipe = read_recipe(path, request.overrides, request.task, request.ds_config, TaskOptions())
    if (command := click.get_current_context(silent=True)) is not None:
        set_key_locations(recipe.locate_key)
        command.call_on_close(set_key_locations)
    check_run_dir(request, recipe.name)
    check_keys(request.allowed_changes, "--allow-change")
    # Absolute: workers may start in another folder.
    config = resolve_paths(recipe.config, recipe.folder)
    return replace(recipe, config=fill_defaults(config, find_task(config.task)))


def get_run_dir(request: TrainRequest, name: str) -> Path:
    """Return --run-dir or runs/NAME: the same for the same command, so that it resumes.

    Raises UsageError for a URL, which would become a local folder of that name.
    """
    if request.run_dir is not None and (scheme := re.match(r"[A-Za-z][\w+.-]+:/", str(request.run_dir))):
        raise UsageError(
            f"--run-dir {request.run_dir}: {scheme[0]}… is no folder of this machine; mount it and give the path, or "
            "give a local folder and copy it afterwards"
        )
    # Not Path.resolve: it raises RuntimeError on a loop of links, which is reported when the folder
    # is created.
    return Path(os.path.realpath((request.run_dir or Path("runs") / name).expanduser()))


def _check_dir_options(request: TrainRequest) -> None:
    """Raise UsageError for a --resume or --run-dir that does not name a folder."""
    known = ("auto", "never")
    if request.resume not in known and not path_exists(Path(request.resume).expanduser()):
        hint = suggest_name(request.resume, known)
        fix = hint if hint.startswith("did you mean") else "write auto, never, or the folder of a run or a checkpoint"
        raise UsageError(f"--resume {request.resume}: is neither auto nor never nor an existing folder; {fix}")
    if request.run_dir == Path():
        problem = "is empty or the working directory, but a run has a folder of its own"
        raise UsageError(f"--run-dir: {problem}; give one, such as --run-dir runs/first")


REPLACED_NAMES = (
    *("recipe.yaml", "metrics.jsonl", "ds_config.json", "report.html", "task.py"),
    *("tokenizer", "model", "profile"),
)
"""Files and folders that a run replaces in its folder; environment.json is the first."""


def _has_content(path: Path) -> bool:
    """Return True for a file or folder that is not empty: a killed start leaves empty ones."""
    if path.is_dir():
        return any(path.iterdir())
    return path_exists(path) and path.stat().st_size > 0


def check_run_dir(request: TrainRequest, name: str) -> None:
    """Raise UsageError for a run folder that is a file, is not UTF-8, or holds other files than a run's."""
    folder = get_run_dir(request, name)
    check_path_encoding(str(folder))
    place = next((path for path in (folder, *folder.parents) if path_exists(path)), folder)
    if path_exists(place) and not place.is_dir():
        raise UsageError(f"--run-dir {folder}: cannot be written ({place} is not a folder); choose another folder")
    checkpoints = folder / "checkpoints"
    if (checkpoints.is_symlink() or path_exists(checkpoints)) and not checkpoints.is_dir():
        problem = "is a link to a folder that does not exist" if checkpoints.is_symlink() else "is not a folder"
        raise UsageError(f"{checkpoints}: {problem}; mount the disk, or move it away")
    if request.run_dir is None or any(path_exists(folder / mark) for mark in ("environment.json", "checkpoints")):
        return
    problem = ""
    if str(folder) in SYSTEM_FOLDERS | {os.path.expanduser("~")} or str(folder).startswith(("/proc/", "/sys/")):
        problem = "is a folder of the system, but a run has a folder of its own"
    elif folder in (Path.cwd(), *Path.cwd().parents):
        problem = "is the working directory or above it, but a run has a folder of its own"
    else:
        taken = [name for name in REPLACED_NAMES if _has_content(folder / name)]
        if taken:
            problem = f"contains a {taken[0]} that is not a run's, and a run would overwrite it"
    if problem:
        raise UsageError(f"--run-dir {request.run_dir}: {problem}; choose another, such as --run-dir runs/first")


def resolve_paths(config: RunConfig, recipe_dir: Path) -> RunConfig:
    """Make paths absolute: they are looked up in the working directory, then next to the recipe.

    Raises RecipeError for missing data files.
    """
    values = config.model_dump()
    if "lora" not in config.model.model_fields_set:
        del values["model"]["lora"]  # a null would mean no adapters
    faults: list[Fault] = []
    runs = {key: run for key in ("path", "init") if (run := find_run(values["model"][key], recipe_dir))}
    items = [("data.train", source, TrainDatasetConfig.default_split) for source in values["data"]["train"]]
    items += [("data.eval", values["data"]["eval"], DatasetConfig.default_split)] if values["data"]["eval"] else []
    for split, place, usual_split in items:
        if place["media_dir"] is not None:
            place["media_dir"] = str(find_path(place["media_dir"], recipe_dir) or place["media_dir"])
        found = find_path(place["path"], recipe_dir) or find_pattern(place["path"], recipe_dir)
        if found is not None:
            problem = f"works only for Hub datasets; {place['path']} is a local file"
            faults += [Fault(f"{split}.{key}", problem, "remove it") for key in ("split", "name") if place[key]]
            place["path"] = str(found)
        elif is_hub_name(place["path"]):
            place["split"] = place["split"] or usual_split
        else:
            faults.append(_missing_file_fault(split, str(place["path"]), recipe_dir))
    for place, key in (
        (values["model"], "path"),
        (values["model"], "tokenizer"),
        (values["model"], "processor"),
        (values["model"], "chat_template"),
        (values["eval"]["generate"] or {}, "reward_model"),
        (values, "task"),
        (values, "ds_config"),
    ):
        _resolve_path(place, key, recipe_dir)
    values["log"]["sinks"] = [_resolve_sink(name, recipe_dir) for name in values["log"]["sinks"]]
    if (init := values["model"]["init"]) is not None and "init" not in runs:
        values["model"]["init"] = str(find_path(init, recipe_dir) or init)
        try:
            find_init_files(values["model"]["init"])
        except RecipeError as error:
            faults += error.faults
    if faults:
        raise RecipeError(faults)
    for option in find_task(values["task"]).path_options:
        *blocks, key = option.split(".")
        block: Any = values["options"]
        for name in blocks:
            block = block.get(name) if isinstance(block, dict) else None
        if isinstance(block, dict):
            _resolve_path(block, key, recipe_dir)
    for key, (run_dir, step) in runs.items():
        values["model"][key] = str(_export_run(f"model.{key}", run_dir, step, is_init=key == "init"))
    return RunConfig.model_validate(values)


def _resolve_path(block: dict[str, Any], key: str, recipe_dir: Path) -> None:
    """Make the path under a key absolute; leave names and missing keys as they are."""
    text = block.get(key)
    if not isinstance(text, str) or not text:
        return
    is_path = "/" in text or text.endswith((".json", ".py", ".jinja"))
    if not is_path and key not in ("task", "ds_config"):  # a folder here is never taken for a task or preset
        is_path = path_exists(Path(text)) and Path(text).is_dir()
    path = find_path(text, recipe_dir) if is_path else None
    if path is not None:
        block[key] = str(path)


def find_run(text: str | None, recipe_dir: Path) -> tuple[Path, str] | None:
    """Return run folder and checkpoint of a value RUN, RUN@best, RUN@last or RUN@STEP; None for other values."""
    before, _, after = (text or "").rpartition("@")
    for name, step in ((text, "best"), (before, after)):
        folder = find_path(name, recipe_dir) if name else None
        if folder is not None and path_exists(folder / "recipe.yaml") and path_exists(folder / "checkpoints"):
            return folder, step
    return None


def _export_run(key: str, run_dir: Path, step: str, is_init: bool) -> Path:
    """Return the export of a run's checkpoint, RUN/exports/…: of adapters their folder, merged for model.init.

    It is written once, by one process; the others of its host wait. Raises RecipeError, CheckpointError.
    """
    from dstrain.commands.export import export_model
    from dstrain.training.checkpoints import select_checkpoint
    from dstrain.training.state.manifest import MANIFEST_FILE

    try:
        found = select_checkpoint(run_dir, step)
        merges = is_init and read_recipe(run_dir / "recipe.yaml").config.model.lora is not None
        # With its hash: after `--resume never` the run has another checkpoint of the same step.
        name = f"{found.path.name}-{file_digest(found.path / MANIFEST_FILE)[:12]}{'-merged' if merges else ''}"
        place = run_dir / "exports" / name
        with open_for_writing(place.parent / ".lock", append=True) as lock:
            with contextlib.suppress(OSError):  # a file system without locks: the first to finish gives the name
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                log_stderr(f"{key}: exporting step {found.step} of {run_dir}, once")
                export_model(run_dir, str(found.step), place, merge_lora=merges)
    except (UsageError, OSError) as error:
        fix = "name another checkpoint (RUN@STEP, `dstrain checkpoints RUN`), or export it yourself (dstrain export)"
        raise RecipeError(Fault(key, f"{run_dir}@{step} cannot be exported ({error})", fix)) from error
    return place


def _resolve_sink(name: str, recipe_dir: Path) -> str:
    """Return FILE.py:Class, with an absolute path, for a sink in a file, or in a module that only is next to the recipe."""
    place, mark, class_name = name.rpartition(":" if ".py:" in name else ".")
    found = find_path(place if mark == ":" else f"{place.replace('.', '/')}.py", recipe_dir)
    if found is None:
        return name
    usual = None
    with contextlib.suppress(ImportError, ValueError):  # of a module without a spec
        usual = None if mark == ":" else find_spec(place.partition(".")[0])
    is_other = usual is not None and (usual.origin is None or Path(usual.origin).resolve() != found.resolve())
    return name if is_other else f"{found}:{class_name}"


def _missing_file_fault(key: str, text: str, recipe_dir: Path) -> Fault:
    path = Path(text).expanduser()
    if reason := next(filter(None, map(not_file_reason, (path, recipe_dir / path))), ""):
        return Fault(f"{key} {text}", reason, "give a .jsonl, .json or .parquet file")
    if "$" in text:
        return Fault(f"{key} {text}", "holds a $, but dstrain replaces no variables", "write the path out")
    if scheme := re.match(r"[A-Za-z][\w+.-]+://", text):
        fix = "download or mount it, and give the local path; or write org/name for a dataset on the hub"
        return Fault(f"{key} {text}", f"data is not read from {scheme[0]}", fix)
    if "," in text:
        return Fault(f"{key} {text}", "there is no such file", f"write several as a list: [{text}]")
    places = [os.path.realpath(path.parent)] if path.is_absolute() else [str(Path.cwd()), str(recipe_dir)]
    siblings = [other.name for other in path.parent.glob("*")] if path_exists(path.parent) else []
    hint = suggest_name(path.name, siblings) if siblings else ""
    fix = hint if hint.startswith("did you mean") else "check the path, or write org/name for a dataset on the hub"
    return Fault(f"{key} {text}", f"there is no such file in {' or '.join(dict.fromkeys(places))}", fix)
