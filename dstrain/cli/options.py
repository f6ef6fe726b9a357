"""Click options and command classes shared by several commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from dstrain.cli.completion import (
    complete_names,
    preset_names,
    preset_names_and_auto,
    recipe_keys,
    recipe_names,
    set_prefixes,
    shape_names,
    step_names,
    task_names,
)
from dstrain.cli.examples import DOCUMENTATION, EXAMPLES
from dstrain.errors import EXIT_OUTPUT_CLOSED, DstrainError, UsageError, explain_system_error
from dstrain.process_setup import discard_closed_output, prepare_process

UNSUPPORTED_COMMANDS = {
    "doctor": "check a recipe on this machine with `dstrain train RECIPE --dry-run`",
    "report": "see metrics.jsonl or TensorBoard",
}
"""Planned commands, and what to use until they exist."""
LAUNCH_OPTIONS = (
    click.option(
        "--num-gpus",
        "--num_gpus",
        type=int,
        help="Processes per host, one per GPU; default: all visible GPUs, or 1 on a CPU.",
    ),
    click.option("--num-nodes", "--num_nodes", type=int, help="Number of hosts, from the top of the hostfile."),
    click.option("--hostfile", type=click.Path(), help="File with one line per host: host1 slots=8"),
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
        type=click.Choice(["deepspeed", "openmpi", "ssh", "torchrun", "slurm"]),
        default="deepspeed",
        help="Program that starts the processes; deepspeed uses pdsh if there is a hostfile.",
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
    click.argument("recipe", required=False, shell_complete=complete_names(recipe_names, or_file=True)),
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
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a recipe key, such as optim.lr=2e-5; repeatable.",
        shell_complete=complete_names(set_prefixes),
    ),
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
MACHINE_OPTIONS = (
    click.option(
        "--gpu-memory",
        "--gpu_memory",
        metavar="SIZE",
        help="Memory of one GPU, such as 24GiB; default: this machine's.",
    ),
    click.option("--gpus", type=click.IntRange(1), help="GPUs per host; default: those of this machine, or 1."),
)
"""GPUs of another machine than this one."""
PLAN_OPTIONS = (
    *MACHINE_OPTIONS,
    click.option("--nodes", type=click.IntRange(1), default=1, help="Hosts."),
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
MODEL_OPTIONS = (
    click.argument("run_or_model", type=click.Path(exists=True, path_type=Path)),
    FOLDER_TASK_OPTION,
    click.option("--step", default="best", metavar="N|best|last", shell_complete=complete_names(step_names), help="Checkpoint of a run; last if there is no best."),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", shell_complete=complete_names(set_prefixes), help="Override a recipe key, such as batch.micro=8; repeatable."),
    click.option(
        "--ds-config", "--ds_config", metavar="NAME|PATH",
        shell_complete=complete_names(preset_names, or_file=True),
        help="Preset or DeepSpeed JSON for holding the model, such as zero3 (sharded). Default: as trained; replicated in one process.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)  # fmt: skip
MODEL_OPTION_NAMES = ("task", "step", "overrides", "ds_config")
SAMPLING_OPTIONS = (
    click.option("--max-new-tokens", "--max_new_tokens", default=256, type=click.IntRange(1), help="Maximum number of tokens per answer."),
    click.option("--temperature", default=0.0, type=click.FloatRange(0), help="Sampling temperature; 0 decodes greedily."),
    click.option(
        "--top-p", "--top_p", default=1.0, type=click.FloatRange(0, 1, min_open=True),
        help="Nucleus sampling: sample from the most likely tokens with this total probability.",
    ),
    click.option("--seed", default=0, type=click.IntRange(0), help="Random seed for sampling."),
    click.option("--batch", default=8, type=click.IntRange(1), help="Prompts per batch."),
)  # fmt: skip
SAMPLING_OPTION_NAMES = ("max_new_tokens", "temperature", "top_p", "seed", "batch")
SCRATCH_OPTION = click.option(
    "--scratch", hidden=True, type=click.Path(path_type=Path), help="Set by dstrain for its worker processes."
)


class GroupedCommand(click.Command):
    """Command whose help lists the launch options under a separate heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, of_launch in (("Options", False), ("Launch options", True)):
            options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
            params = [option for option in options if (option.name in LAUNCH_OPTION_NAMES) == of_launch]
            if rows := [row for param in params if (row := param.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)


class SubcommandGroup(click.Group):
    """Group whose help ends with examples."""

    command_class = GroupedCommand

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)


class CommandGroup(SubcommandGroup):
    """Command group that turns DstrainErrors into one message and their exit code."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(DOCUMENTATION)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_process()
        return super().main(*args, **kwargs)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in UNSUPPORTED_COMMANDS:
            raise UsageError(f"dstrain {args[0]}: not supported yet; {UNSUPPORTED_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if sys.flags.optimize > 1:
                problem = "Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which transformers needs"
                raise UsageError(f"{problem}; unset PYTHONOPTIMIZE, or set it to 1")
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would exit with 1, which says that a run failed. A broken pipe to another process is such a failure.
            if not discard_closed_output():
                raise
            ctx.exit(EXIT_OUTPUT_CLOSED)
        except DstrainError as error:
            _exit_with_error(ctx, error)
        except (RuntimeError, OSError) as error:
            if (fault := explain_system_error(error)) is None:
                raise
            _exit_with_error(ctx, fault)


def write_examples(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the examples of a command, each on a line of its own, however narrow the terminal is."""
    # The name by which it was started may be a path.
    name = " ".join(["dstrain", *ctx.command_path.split()[1:]]) if ctx.parent else "dstrain"
    if lines := EXAMPLES.get(name):
        with formatter.section("Examples"):
            for line in lines:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _exit_with_error(ctx: click.Context, error: DstrainError) -> NoReturn:
    """Print an error and exit with its code, also where nobody reads it."""
    try:
        click.echo(f"error: {error}", err=True)
    except BrokenPipeError:
        discard_closed_output()
    ctx.exit(error.exit_code)


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
