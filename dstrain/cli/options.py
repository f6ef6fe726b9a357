"""Options that several commands share, and the completion of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

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


def complete_names(source: str | Sequence[str], *more: str, or_file: bool = False, suffix: str = "") -> Complete:
    """Return a callback that completes names, and files where `or_file`.

    `source`: the names, or `module:function` of what lists them, which is imported only when they are asked for.
    `suffix`: is written after each name.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # First: bash forgets the names before it.
        files = [CompletionItem(incomplete, type="file")] if or_file else []
        listed: Iterable[str] = resolve_name(source)() if isinstance(source, str) else source
        names = [f"{name}{suffix}" for name in (*listed, *more)]
        return files + [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete


RECIPES, PRESETS = "dstrain.commands.recipe_args:list_builtin_recipes", "dstrain.preset:preset_names"
TASKS, KEYS = "dstrain.tasks:builtin_tasks", "dstrain.config:list_keys"
STEPS = ("best", "last")


class _Count(click.IntRange):
    """Whole number up to a limit; click calls IntRange a `valid integer range` in its messages."""

    name = "integer"


def set_option(help_text: str) -> Callable[..., Any]:
    """Return the option --set KEY=VALUE with this help."""
    complete = complete_names(KEYS, suffix="=")
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=help_text, shell_complete=complete
    )


class PathArgument(click.Path):
    """Path of a file or folder. An empty one is refused: pathlib takes it for the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty; give a path", param, ctx)
        return super().convert(value, param, ctx)


class LaunchOption(click.Option):
    """Option that says which processes run on which hosts."""


COUNT = _Count(max=100_000)
launch_option = partial(click.option, cls=LaunchOption)
LAUNCH_OPTIONS = (
    launch_option(
        "--num-gpus",
        "--num_gpus",
        type=COUNT,
        help="Processes per host, one per GPU; default: all visible GPUs, or 1 on a CPU.",
    ),
    launch_option(
        "--num-nodes",
        "--num_nodes",
        type=COUNT,
        help="Number of hosts, from the top of the hostfile or given by Slurm.",
    ),
    launch_option("--hostfile", type=PathArgument(), help="File with one line per host: host1 slots=8"),
    launch_option("--include", default="", show_default="all", help="GPUs to run on: localhost:0,2 or host1@host2:0,2"),
    launch_option("--exclude", default="", show_default="none", help="GPUs not to use: localhost:1 or host2"),
    launch_option(
        "--node-rank", "--node_rank", type=int, help="Index of this host in the hostfile, from 0; with --no-ssh."
    ),
    launch_option("--master-addr", "--master_addr", help="Address of rank 0's host."),
    launch_option(
        "--master-port", "--master_port", type=int, help="Rendezvous port on rank 0's host; default: a free one."
    ),
    launch_option("--no-ssh", "--no_ssh", is_flag=True, help="You start the command on every host yourself."),
    launch_option(
        "--launcher",
        type=click.Choice(["ssh", "slurm"]),
        default="ssh",
        help="How other hosts are started: over ssh, or by a job that is submitted to Slurm (train only).",
    ),
)
"""Processes and hosts: the fields of `dstrain.launch.plan.LaunchOptions`."""
RECIPE_OPTIONS = (
    click.argument("recipe", type=PathArgument(), required=False, shell_complete=complete_names(RECIPES, or_file=True)),
    click.option(
        "--task",
        help="Packaged task, path of a task file, or dotted module.",
        shell_complete=complete_names(TASKS, or_file=True),
    ),
    click.option(
        "--ds-config",
        "--ds_config",
        metavar="NAME|PATH|auto",
        help="Preset or DeepSpeed JSON file; default: ds_config of the recipe.",
        shell_complete=complete_names(PRESETS, "auto", or_file=True),
    ),
    set_option("Override a recipe key, such as optim.lr=2e-5; repeatable."),
)
TRAIN_OPTIONS = (
    click.option(
        "--run-dir", "--run_dir", type=click.Path(path_type=Path), help="Run folder; default: runs/NAME of the recipe."
    ),
    click.option(
        "--resume",
        default="auto",
        metavar="auto|never|DIR",
        help="Resume from the latest complete checkpoint.",
    ),
    click.option(
        "--allow-change",
        "allowed_changes",
        multiple=True,
        metavar="KEY",
        help="Recipe key that may differ on resume; repeatable.",
        shell_complete=complete_names(KEYS),
    ),
    click.option("--dry-run", is_flag=True, help="Print recipe, DeepSpeed JSON and launch command; start nothing."),
)
READER_OPTIONS = (
    click.option(
        "--recipe",
        type=PathArgument(),
        shell_complete=complete_names(RECIPES, or_file=True),
        help="YAML file or packaged recipe with model, columns and limits.",
    ),
    click.option(
        "--task",
        shell_complete=complete_names(TASKS, or_file=True),
        help="Task that reads the file; default: the task of --recipe.",
    ),
)
"""What a data file is read with."""
MACHINE_OPTIONS = (
    click.option(
        "--gpu-memory",
        "--gpu_memory",
        metavar="SIZE",
        help="Memory of one GPU, such as 24GiB; default: this machine's.",
    ),
    click.option("--gpus", type=click.IntRange(1, 1024), help="GPUs per host; default: this machine's, or 1."),
)
"""GPUs of another machine than this one."""
PLAN_OPTIONS = (
    *MACHINE_OPTIONS,
    click.option(
        "--host-memory",
        "--host_memory",
        metavar="SIZE",
        help="Memory of one host, such as 256GiB. Default: this machine's, where its GPUs are planned for.",
    ),
    click.option("--nodes", type=click.IntRange(1, 100_000), default=1, help="Hosts."),
    click.option(
        "--images",
        type=click.IntRange(1, 1000),
        help="Images of each row of data. Default: options.max_pages of docqa, else 1.",
    ),
    click.option(
        "--model-shape",
        "--model_shape",
        metavar="NAME",
        help="Plan a packaged shape, such as llama-3.1-70b, instead of the recipe's model.",
        shell_complete=complete_names("dstrain.planner.shapes:shape_names"),
    ),
)
FOLDER_TASK_OPTION = click.option(
    "--task",
    help="Packaged task, or the task file of the run: code in the folder is not run by itself.",
    shell_complete=complete_names(TASKS, or_file=True),
)
CHECKPOINT_OPTIONS = (
    FOLDER_TASK_OPTION,
    click.option("--step", default="best", metavar="N|best|last", shell_complete=complete_names(STEPS), help="Checkpoint of a run; last if there is no best."),
    set_option("Override a recipe key, such as batch.micro=8; repeatable."),
)  # fmt: skip
MODEL_OPTIONS = (
    click.argument("folder", metavar="RUN_OR_MODEL", type=PathArgument(exists=True, path_type=Path)),
    *CHECKPOINT_OPTIONS,
    click.option(
        "--ds-config", "--ds_config", metavar="NAME|PATH",
        shell_complete=complete_names(PRESETS, or_file=True),
        help="Preset or DeepSpeed JSON for holding the model, such as zero3 (sharded). Default: as trained; replicated in one process.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)  # fmt: skip
TOKEN_OPTIONS = (
    click.option("--max-new-tokens", "--max_new_tokens", default=256, type=click.IntRange(1), help="Maximum number of tokens per answer."),
    click.option("--temperature", default=0.0, type=click.FloatRange(0), help="Sampling temperature; 0 decodes greedily."),
    click.option(
        "--top-p", "--top_p", default=1.0, type=click.FloatRange(0, 1, min_open=True),
        help="Nucleus sampling: sample from the most likely tokens with this total probability.",
    ),
    click.option("--seed", default=0, type=click.IntRange(0), help="Random seed for sampling."),
)  # fmt: skip
SAMPLING_OPTIONS = (
    *TOKEN_OPTIONS,
    click.option("--num-samples", "--num_samples", default=1, type=click.IntRange(1), help="Answers to each prompt; several need a temperature above 0."),
    click.option("--batch", default=8, type=click.IntRange(1), help="Answers per batch."),
)  # fmt: skip
SCRATCH_OPTION = click.option(
    "--scratch", hidden=True, type=click.Path(path_type=Path), help="Set by dstrain for its worker processes."
)


def with_options(*groups: Sequence[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds groups of options to a command."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def pop_fields(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that are fields of a dataclass, and return them."""
    return {name: options.pop(name) for name in [*options] if name in kind.__dataclass_fields__}
