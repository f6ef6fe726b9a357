"""Lookup of recipes and of the paths in them, by the names that a command is given."""

from __future__ import annotations

from pathlib import Path

from dstrain.errors import RecipeError, one_line, suggest_name

RECIPES_DIR = Path(__file__).parents[2] / "recipes"


def list_builtin_recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def find_recipe(name: str | None, optional: bool) -> Path | None:
    """Return the file that RECIPE names: a path, a packaged name, or ./recipe.yaml. Raises
    RecipeError.

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
    if path.suffix in (".yaml", ".yml") or "/" in name or path_exists(path):
        if path_exists(path):
            raise RecipeError(f"RECIPE {one_line(name)}: is a folder; give the YAML file in it")
        raise RecipeError(
            f"RECIPE {one_line(name)}: there is no such file (working directory: {Path.cwd()}); check the path"
        )
    raise RecipeError(
        f"RECIPE {one_line(name)}: is neither a file nor a packaged recipe; {suggest_name(name, list_builtin_recipes())}"
    )


def find_path(text: str, recipe_dir: Path) -> Path | None:
    """Return the existing path that `text` means, absolute; None if there is none.

    Raises RecipeError.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise RecipeError(f"{text}: begins with ~, but no home folder is known; write it out, or set HOME") from None
    return next((place.resolve() for place in (path, recipe_dir / path) if path_exists(place)), None)


def path_exists(path: Path) -> bool:
    """Return True if the path exists; False for one that is too long, or in a folder without
    permission.
    """
    try:
        return path.exists()
    except OSError:
        return False
