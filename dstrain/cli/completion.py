"""Shell completion: the scripts of bash, zsh and fish, and the values of arguments and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

SCRIPT_ENV = "_DSTRAIN_COMPLETE"
"""Environment variable by which the scripts ask for completions (Shell Completion in click's documentation)."""
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completion_script(command: click.Command, shell: str) -> str:
    """Return the completion script of `dstrain` for a shell."""
    found = get_completion_class(shell)
    assert found is not None, shell
    return found(command, {}, "dstrain", SCRIPT_ENV).source()


def complete_names(list_names: Callable[[], Iterable[str]], or_file: bool = False) -> Complete:
    """Return a callback that completes names, and files where `or_file`. Names are listed only when asked for."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # First: bash forgets the names before it.
        files = [CompletionItem(incomplete, type="file")] if or_file else []
        return files + [CompletionItem(name) for name in list_names() if name.startswith(incomplete)]

    return complete


def recipe_names() -> Iterable[str]:
    """Return the packaged recipes."""
    from dstrain.commands.recipe.find_recipe import list_builtin_recipes

    return list_builtin_recipes()


def preset_names() -> Iterable[str]:
    """Return the packaged presets."""
    from dstrain.preset import preset_names as names

    return names()


def preset_names_and_auto() -> Iterable[str]:
    """Return the packaged presets and the word for choosing one."""
    return [*preset_names(), "auto"]


def task_names() -> Iterable[str]:
    """Return the packaged tasks."""
    from dstrain.tasks import builtin_tasks

    return builtin_tasks()


def shape_names() -> Iterable[str]:
    """Return the packaged model shapes."""
    from dstrain.planner.read_shape import shape_names as names

    return names()


def step_names() -> Iterable[str]:
    """Return the words for a checkpoint."""
    return ("best", "last")


def recipe_keys() -> Iterable[str]:
    """Return the keys of a recipe."""
    from dstrain.config import list_keys

    return list_keys()


def set_prefixes() -> Iterable[str]:
    """Return the beginnings of --set: every key of a recipe, and `=`."""
    return [f"{key}=" for key in recipe_keys()]
