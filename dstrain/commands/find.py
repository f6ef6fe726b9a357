"""Find the recipe a command names, and make the paths in it absolute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.config import Recipe, RunConfig, check_keys, read_recipe
from dstrain.errors import Fault, RecipeError, did_you_mean

RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line asks to train."""

    recipe: str | None = None
    task: str | None = None
    ds_config: str | None = None
    sets: Sequence[str] = ()
    run_dir: Path | None = None
    resume: str = "auto"
    allowed: Sequence[str] = ()

    def arguments(self, run_dir: Path) -> list[str]:
        """The same wish as arguments of `dstrain`, for the workers."""
        path = find_recipe(self.recipe, bool(self.task or self.sets))
        words = ["train", *([str(path)] if path else []), "--run-dir", str(run_dir), "--resume", self.resume]
        for option, values in (("--task", [self.task]), ("--ds-config", [self.ds_config])):
            words += [word for value in values if value for word in (option, value)]
        for option, many in (("--set", self.sets), ("--allow-change", self.allowed)):
            words += [word for value in many for word in (option, value)]
        return words


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with dstrain."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str | None, may_be_absent: bool) -> Path | None:
    """The file that RECIPE names: a path, a packaged name, or ./recipe.yaml. Raises RecipeError."""
    if name is None:
        default = Path("recipe.yaml")
        if default.is_file():
            return default.resolve()
        if may_be_absent:
            return None
        raise RecipeError(
            "no RECIPE was given and there is no ./recipe.yaml; give a file, the name of a packaged recipe "
            f"({', '.join(packaged_recipes())}), or --task and --set"
        )
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    if name in packaged_recipes():
        return RECIPES / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml") or "/" in name:
        raise RecipeError(f"RECIPE {name}: there is no such file (we are in {Path.cwd()}); check the path")
    raise RecipeError(
        f"RECIPE {name}: is neither a file nor a packaged recipe; {did_you_mean(name, packaged_recipes())}"
    )


def resolve_wish(wish: Wish) -> Recipe:
    """The wished recipe with --set, --task and --ds-config applied and its paths absolute. Raises RecipeError."""
    path = find_recipe(wish.recipe, bool(wish.task or wish.sets or wish.ds_config))
    recipe = read_recipe(path, wish.sets, wish.task, wish.ds_config)
    check_keys(wish.allowed, "--allow-change")
    return Recipe(absolute_paths(recipe.config, recipe.folder), recipe.name, recipe.folder)


def absolute_paths(config: RunConfig, folder: Path) -> RunConfig:
    """Paths are looked up in the working directory, then beside the recipe. Raises RecipeError for missing data files."""
    values = config.model_dump()
    faults: list[Fault] = []
    for place, key in _data_paths(values):
        found = locate(place[key], folder)
        if found is None:
            faults.append(_missing(str(place[key]), folder))
        else:
            place[key] = str(found)
    for place, key in (
        (values["model"], "path"),
        (values["model"], "tokenizer"),
        (values, "task"),
        (values, "ds_config"),
    ):
        text = place[key]
        found = locate(text, folder) if isinstance(text, str) and text and _is_path(text) else None
        if found is not None:
            place[key] = str(found)
    if faults:
        raise RecipeError(faults)
    return RunConfig.model_validate(values)


def _data_paths(values: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    found = [(source, "path") for source in values["data"]["train"]]
    return found + ([(values["data"], "eval")] if values["data"]["eval"] else [])


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith((".json", ".py")) or Path(text).is_dir()


def locate(text: str, folder: Path) -> Path | None:
    """The existing path that `text` means, absolute; None where there is none."""
    path = Path(text).expanduser()
    return next((place.resolve() for place in (path, folder / path) if place.exists()), None)


def _missing(text: str, folder: Path) -> Fault:
    path = Path(text).expanduser()
    places = [str(path.parent.resolve())] if path.is_absolute() else [str(Path.cwd()), str(folder)]
    beside = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, beside) if beside else ""
    mend = hint if hint.startswith("did you mean") else "check the path; names from the hub are not supported yet"
    return Fault(f"data file {text}", f"there is no such file in {' or '.join(dict.fromkeys(places))}", mend)
