"""Options that several commands of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

LAUNCH_OPTIONS = (
    click.option("--num-gpus", "--num_gpus", type=int, help="Processes on this host; on a CPU just processes."),
    click.option("--num-nodes", "--num_nodes", type=int, help="Hosts to take from the top of the hostfile."),
    click.option("--hostfile", type=click.Path(), help="Lines of `host slots=8`."),
    click.option("--include", default="", help="GPUs to run on: localhost:0,2 or host1@host2:0,2"),
    click.option("--exclude", default="", help="GPUs to leave alone: localhost:1 or host2"),
    click.option("--node-rank", "--node_rank", type=int, help="This host's place among the hosts."),
    click.option("--master-addr", "--master_addr", help="Address of rank 0's host."),
    click.option("--master-port", "--master_port", type=int, help="Port where the ranks meet; default: a free one."),
    click.option("--no-ssh", "--no_ssh", is_flag=True, help="Every host is given its own command."),
    click.option(
        "--launcher",
        type=click.Choice(["deepspeed", "openmpi", "ssh", "torchrun", "slurm"]),
        default="deepspeed",
        help="What starts the processes; the run is the same. deepspeed: over pdsh where there is a hostfile.",
    ),
)
"""On which processes: the fields of `dstrain.launch.command.LaunchOptions`."""
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
    click.argument("recipe", required=False),
    click.option("--task", help="A packaged task, a file path, or a dotted module."),
    click.option("--ds-config", "--ds_config", metavar="NAME|PATH|auto", help="Preset or DeepSpeed JSON."),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: optim.lr=2e-5"),
)
FOLDER_TASK_OPTION = click.option(
    "--task", help="The task: a packaged one, or the task file it was trained with, which no folder runs by itself."
)
MODEL_OPTIONS = (
    click.argument("run_or_model", type=click.Path(exists=True, path_type=Path)),
    FOLDER_TASK_OPTION,
    click.option("--step", default="best", metavar="N|best|last", show_default=True, help="Checkpoint of a run; last where none is best."),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: batch.micro=8"),
    click.option(
        "--ds-config", "--ds_config", metavar="NAME|PATH",
        help="Preset or DeepSpeed JSON that says how to hold the model, such as zero3 (in shards). Default: as trained; in one process whole.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)  # fmt: skip
MODEL_OPTION_NAMES = ("task", "step", "overrides", "ds_config")
SAMPLING_OPTIONS = (
    click.option("--max-new-tokens", "--max_new_tokens", default=256, type=click.IntRange(1), show_default=True, help="Most tokens of an answer."),
    click.option("--temperature", default=0.0, type=click.FloatRange(0), help="Sampling temperature; 0, the default: always the likeliest token."),
    click.option(
        "--top-p", "--top_p", default=1.0, type=click.FloatRange(0, 1, min_open=True),
        help="Sample from the likeliest tokens that have this probability together.",
    ),
    click.option("--seed", default=0, type=click.IntRange(0), help="Seed of the sampling."),
    click.option("--batch", default=8, type=click.IntRange(1), show_default=True, help="Prompts answered together."),
)  # fmt: skip
SAMPLING_OPTION_NAMES = ("max_new_tokens", "temperature", "top_p", "seed", "batch")
SCRATCH_OPTION = click.option(
    "--scratch", hidden=True, type=click.Path(path_type=Path), help="Set by dstrain for its workers."
)


class GroupedCommand(click.Command):
    """A command whose help has the launch options under a heading of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, of_launch in (("Options", False), ("Launch options", True)):
            options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
            params = [option for option in options if (option.name in LAUNCH_OPTION_NAMES) == of_launch]
            if rows := [row for param in params if (row := param.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def with_options(*groups: Sequence[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of several commands: recipe or trained model, and on which processes to run."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def pop_options(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The options of these names, taken out of the others."""
    return {name: options.pop(name) for name in names}
