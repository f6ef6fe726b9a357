"""Options that several commands share, and the completion of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
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


def complete_names(list_names: Callable[[], Iterable[str]], or_file: bool = False) -> Complete:
    """Return a callback that completes names, and files where `or_file`. Names are listed only when asked for."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # First: bash forgets the names before it.
        files = [CompletionItem(incomplete, type="file")] if or_file else []
        return files + [CompletionItem(name) for name in list_names() if name.startswith(incomplete)]

    return complete


def recipe_names() -> Iterable[str]:
    """Return the packaged recipes."""
    from dstrain.commands.recipe_args import list_builtin_recipes

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
    from dstrain.planner.shapes import shape_names as names

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


class _Count(click.IntRange):
    """Whole number up to a limit; click calls IntRange a `valid integer range` in its messages."""

    name = "integer"


def set_option(help_text: str) -> Callable[..., Any]:
    """Return the option --set KEY=VALUE with this help."""
    complete = complete_names(set_prefixes)
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=help_text, shell_complete=complete
    )


class PathArgument(click.Path):
    """Path of a file or folder. An empty one is refused: pathlib takes it for the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty; give a path", param, ctx)
        return super().convert(value, param, ctx)


COUNT = _Count(max=100_000)
LAUNCH_OPTIONS = (
    click.option(
        "--num-gpus",
        "--num_gpus",
        type=COUNT,
        help="Processes per host, one per GPU; default: all visible GPUs, or 1 on a CPU.",
    ),
    click.option(
        "--num-nodes",
        "--num_nodes",
        type=COUNT,
        help="Number of hosts, from the top of the hostfile or given by Slurm.",
    ),
    click.option("--hostfile", type=PathArgument(), help="File with one line per host: host1 slots=8"),
    click.option("--include", default="", show_default="all", help="GPUs to run on: localhost:0,2 or host1@host2:0,2"),
    click.option("--exclude", default="", show_default="none", help="GPUs not to use: localhost:1 or host2"),
    click.option(
        "--node-rank", "--node_rank", type=int, help="Index of this host in the hostfile, from 0; with --no-ssh."
    ),
    click.option("--master-addr", "--master_addr", help="Address of rank 0's host."),
    click.option(
        "--master-port", "--master_port", type=int, help="Rendezvous port on rank 0's host; default: a free one."
    ),
    click.option("--no-ssh", "--no_ssh", is_flag=True, help="You start the command on every host yourself."),
    click.option(
        "--launcher",
        type=click.Choice(["ssh", "slurm"]),
        default="ssh",
        help="How other hosts are started: over ssh, or by a job that is submitted to Slurm (train only).",
    ),
)
"""Processes and hosts: the fields of `dstrain.launch.command.LaunchOptions`."""
LAUNCH_OPTION_NAMES = frozenset(
    (
        "num_gpus",
        "num_nodes",
        "hostfile",
        "include",
        "exclude",
        "node_rank",
        "master_addr",
        "master_port",
        "no_ssh",
        "launcher",
    )
)
RECIPE_OPTIONS = (
    click.argument(
        "recipe", type=PathArgument(), required=False, shell_complete=complete_names(recipe_names, or_file=True)
    ),
    click.option(
        "--task",
        help="Packaged task, path of a task file, or dotted module.",
        shell_complete=complete_names(task_names, or_file=True),
    ),
    click.option(
        "--ds-config",
        "--ds_config",
        metavar="NAME|PATH|auto",
        help="Preset or DeepSpeed JSON file; default: ds_config of the recipe.",
        shell_complete=complete_names(preset_names_and_auto, or_file=True),
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
        "allowed",
        multiple=True,
        metavar="KEY",
        help="Recipe key that may differ on resume; repeatable.",
        shell_complete=complete_names(recipe_keys),
    ),
    click.option("--dry-run", is_flag=True, help="Print recipe, DeepSpeed JSON and launch command; start nothing."),
)
READER_OPTIONS = (
    click.option(
        "--recipe",
        type=PathArgument(),
        shell_complete=complete_names(recipe_names, or_file=True),
        help="YAML file or packaged recipe with model, columns and limits.",
    ),
    click.option(
        "--task",
        shell_complete=complete_names(task_names, or_file=True),
        help="Task that reads the file; default: that of --recipe.",
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
    click.option("--gpus", type=click.IntRange(1, 1024), help="GPUs per host; default: those of this machine, or 1."),
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
        shell_complete=complete_names(shape_names),
    ),
)
FOLDER_TASK_OPTION = click.option(
    "--task",
    help="Packaged task, or the task file of the run: code in the folder is not run by itself.",
    shell_complete=complete_names(task_names, or_file=True),
)
CHECKPOINT_OPTIONS = (
    FOLDER_TASK_OPTION,
    click.option("--step", default="best", metavar="N|best|last", shell_complete=complete_names(step_names), help="Checkpoint of a run; last if there is no best."),
    set_option("Override a recipe key, such as batch.micro=8; repeatable."),
)  # fmt: skip
MODEL_OPTIONS = (
    click.argument("run_or_model", type=PathArgument(exists=True, path_type=Path)),
    *CHECKPOINT_OPTIONS,
    click.option(
        "--ds-config", "--ds_config", metavar="NAME|PATH",
        shell_complete=complete_names(preset_names, or_file=True),
        help="Preset or DeepSpeed JSON for holding the model, such as zero3 (sharded). Default: as trained; replicated in one process.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)  # fmt: skip
MODEL_OPTION_NAMES = ("task", "step", "overrides", "ds_config")
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
SAMPLING_OPTION_NAMES = ("max_new_tokens", "temperature", "top_p", "seed", "num_samples", "batch")
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


def pop_options(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Remove the options with these names from `options` and return them."""
    return {name: options.pop(name) for name in names}
