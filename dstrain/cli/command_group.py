"""Click command classes of dstrain: help with examples, and errors as one message with their exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from dstrain.cli.options import LaunchOption
from dstrain.errors import (
    DEBUG_ENV,
    EXIT_FAILED,
    EXIT_OUTPUT_CLOSED,
    DstrainError,
    UsageError,
    describe_unexpected,
    escape_controls,
    explain_system_error,
    find_user_frame,
    format_traceback,
    is_debug,
    save_traceback,
)
from dstrain.files import check_path_encoding
from dstrain.process_setup import discard_closed_output, prepare_process
from dstrain.torchvision_fit import explain_import_error


class GroupedCommand(click.Command):
    """Command whose help lists the launch options under a separate heading."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[GIVEN_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, of_launch in (("Options", False), ("Launch options", True)):
            options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
            params = [option for option in options if isinstance(option, LaunchOption) == of_launch]
            if rows := [row for param in params if (row := param.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)


GIVEN_WORDS = "dstrain.words"
"""Key of a context's `meta`: the words after the command, as they were given."""


class SubcommandGroup(click.Group):
    """Group whose help ends with examples, and whose errors say what another trainer's word is here."""

    command_class = GroupedCommand

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args[0] in OTHER_COMMANDS and ctx.parent is None:
                raise click.UsageError(
                    f"No such command '{args[0]}': write `{OTHER_COMMANDS[args[0]]}`.", ctx
                ) from error
            raise


class CommandGroup(SubcommandGroup):
    """Command group that turns DstrainErrors into one message and their exit code."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(DOCUMENTATION)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_process()
        try:
            words = args[0] if args else kwargs.get("args")
            for word in sys.argv[1:] if words is None else words:
                check_path_encoding(word)
        except UsageError as error:
            echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # of the group's own --help; other commands end in `invoke`
            if (known := explain_system_error(error)) is None:
                raise
            echo(f"error: {known}", err=True)
            sys.exit(known.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke_checked(ctx)
        except BrokenPipeError:
            # click would exit with 1, which says that a run failed. A broken pipe to another process is such a failure.
            if not discard_closed_output():
                raise
            ctx.exit(EXIT_OUTPUT_CLOSED)
        except click.UsageError as error:
            raise _explain_setting(error) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            known = (
                error if isinstance(error, DstrainError) else explain_system_error(error) or explain_import_error(error)
            )
            _exit_with_error(ctx, error, known)

    def _invoke_checked(self, ctx: click.Context) -> Any:
        if ctx.params.pop("debug", False):
            os.environ[DEBUG_ENV] = "1"
        is_debug()
        if sys.flags.optimize > 1:
            problem = "Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which transformers needs"
            raise UsageError(f"{problem}; unset PYTHONOPTIMIZE, or set it to 1")
        return super().invoke(ctx)


def _explain_setting(error: click.UsageError) -> click.UsageError:
    """Return the error with the `--set` that was meant by another trainer's option, or by `key=value`."""
    if not any(param.name == "overrides" for param in (error.ctx.command.params if error.ctx else ())):
        return error
    if isinstance(error, click.NoSuchOption):
        hint = _explain_option(error.option_name, error.ctx.meta.get(GIVEN_WORDS, []) if error.ctx else [])
        return click.UsageError(f"No such option '{error.option_name}': {hint}.", error.ctx) if hint else error
    found = re.search(r"unexpected extra arguments? \((\S+=\S*)", error.message)
    return click.UsageError(f"{error.message}: write --set {found[1].rstrip(')')}.", error.ctx) if found else error


def _explain_option(option: str, words: Sequence[str]) -> str:
    """Return the option that was meant by a word of another trainer, with its value; empty for an unknown word.

    `words`: those of the whole command.
    """
    from dstrain.config import list_keys  # not at the top: --help answers at once
    from dstrain.config.aliases import Answer, find_answer
    from dstrain.tasks import TaskOptions

    name = option.lstrip("-").replace("-", "_")
    value = _find_value(option, words)
    known = list_keys()
    place = TaskOptions().find_place(_find_value("--task", words) or "", name)
    is_of_task = bool(place) and ", of " not in place
    answer = find_answer((name,))
    if name in known:
        answer = Answer("keys", name)
    elif is_of_task or (answer is None and place):
        answer = Answer("keys", place)
    if answer is None:
        return ""
    written = answer.for_value(value).to_option(value, known)
    if name in known:
        return f"write {written}"
    return f"{answer.for_value(value) if value else answer}" + (f": write {written}" if written else "")


def _find_value(option: str, words: Sequence[str]) -> str | None:
    """Return the value of an option, `--name=value` or the word after it; None for a flag."""
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        if equals:
            return value
        return None if following.startswith("--") else following
    return None


def echo(text: str, err: bool = False) -> None:
    """Print a text that may hold parts of files; a terminal does not run the control sequences in it."""
    click.echo(escape_controls(text), err=err)


def write_examples(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the examples of a command, each on a line of its own, however narrow the terminal is."""
    # The name by which it was started may be a path.
    name = " ".join(["dstrain", *ctx.command_path.split()[1:]]) if ctx.parent else "dstrain"
    if lines := EXAMPLES.get(name):
        with formatter.section("Examples"):
            for line in lines:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _exit_with_error(ctx: click.Context, error: Exception, known: DstrainError | None) -> NoReturn:
    """Print an error and exit with its code, also where nobody reads it.

    `known`: the error with a fix; None for an unexpected one, whose traceback is written to a file.
    """
    text = f"error: {known or _summarize(error)}"
    with contextlib.suppress(UsageError):  # of DSTRAIN_DEBUG, which may be the error to print
        text = format_traceback(error) + text if is_debug() else text
    try:
        echo(text, err=True)
    except BrokenPipeError:
        discard_closed_output()
    ctx.exit(EXIT_FAILED if known is None else known.exit_code)


def _summarize(error: Exception) -> str:
    """Return one line about an unexpected error, and where its traceback is."""
    is_user_code = find_user_frame(error) is not None
    whose = "fix the code there" if is_user_code else "this is a bug of dstrain or of a library it uses"
    what = f"unexpected {describe_unexpected(error)}; {whose}; "
    if is_debug():
        return f"{what}{'see' if is_user_code else 'report it with'} the traceback above"
    path = save_traceback(error)
    return f"{what}" + (
        f"the full traceback is in {path}" if path else "run `dstrain --debug ...` to see the traceback"
    )


EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "dstrain": ("dstrain train demo-rm", "dstrain init sft --to sft.yaml", "dstrain plan lowmem-24gb"),
    "dstrain train": (
        "dstrain train demo-rm",
        "dstrain train rm.yaml --num-gpus 8 --ds-config zero3 --set optim.lr=2e-5",
        "dstrain train rm.yaml --hostfile hosts.txt --dry-run",
    ),
    "dstrain evaluate": (
        "dstrain evaluate runs/rm --data held-out.jsonl",
        "dstrain evaluate exported/ --data held-out.jsonl --num-gpus 8 --json",
    ),
    "dstrain generate": (
        "dstrain generate runs/sft --prompt 'How do I whet a chisel?'",
        "dstrain generate runs/vlm --prompt 'What is this?' --image photo.jpg",
        "dstrain generate runs/sft --data prompts.jsonl --temperature 0.7 --json",
        "dstrain generate runs/sft --data prompts.jsonl --num-samples 8 --temperature 1 --json > answers.jsonl",
    ),
    "dstrain chat": (
        "dstrain chat runs/sft --temperature 0.7",
        "dstrain chat runs/sft runs/dpo --system 'Answer in one sentence.'",
        "dstrain chat exported/ --max-new-tokens 64 < questions.txt",
    ),
    "dstrain score": (
        "dstrain score runs/rm --data answers.jsonl --out scored.jsonl",
        "dstrain score runs/sft --data pairs.jsonl --out scored.jsonl --num-gpus 8 --ds-config zero3",
    ),
    "dstrain pairs": (
        "dstrain pairs scored.jsonl --to pairs.jsonl",
        "dstrain pairs scored.jsonl --to pairs.jsonl --all --min-margin 0.5",
    ),
    "dstrain prepare": ("dstrain prepare dpo.yaml", "dstrain prepare dpo.yaml --num-gpus 8 --json"),
    "dstrain bench": ("dstrain bench sft.yaml --steps 50", "dstrain bench sft.yaml --num-gpus 8 --ds-config zero3"),
    "dstrain export": (
        "dstrain export runs/rm --to exported",
        "dstrain export runs/sft --step last --to merged --merge-lora",
        "dstrain export runs/rm --to exported --push-to-hub me/my-rm --private --dry-run",
    ),
    "dstrain init": (
        "dstrain init dpo --to dpo.yaml",
        "dstrain init sft --gpus 8 --gpu-memory 80GiB --to sft.yaml",
        "dstrain init --from llama3_lora_sft.yaml --to sft.yaml",
    ),
    "dstrain data": (
        "dstrain data check pairs.jsonl --task rm",
        "dstrain data show pairs.jsonl --task rm --set model.path=MODEL",
    ),
    "dstrain data show": (
        "dstrain data show pairs.jsonl --task dpo --set model.path=MODEL --limit 5",
        "dstrain data show chats.jsonl --recipe sft.yaml > shown.txt",
    ),
    "dstrain data check": (
        "dstrain data check pairs.jsonl --task rm",
        "dstrain data check answers.jsonl --task sft --set data.columns.text=completion",
    ),
    "dstrain checkpoints": ("dstrain checkpoints runs/rm --verify",),
    "dstrain report": ("dstrain report runs/rm", "dstrain report runs/rm runs/rm-zero3 --to compare.html"),
    "dstrain status": ("dstrain status runs/rm", "dstrain status runs/rm --json"),
    "dstrain plan": (
        "dstrain plan sft.yaml --gpu-memory 24GiB --gpus 8",
        "dstrain plan --task sft --model-shape llama-3.1-70b --gpu-memory 80GiB --gpus 8 --nodes 2",
    ),
    "dstrain presets": (
        "dstrain presets",
        "dstrain presets zero3_offload",
        "dstrain presets --adopt ds_config.json > mine.json",
    ),
    "dstrain tasks": ("dstrain tasks", "dstrain tasks dpo"),
    "dstrain recipes": ("dstrain recipes", "dstrain recipes lowmem-24gb > mine.yaml"),
    "dstrain doctor": (
        "dstrain doctor",
        "dstrain doctor --hostfile hosts --run-dir /shared/runs --json",
    ),
    "dstrain verify": (
        "dstrain verify /models/Qwen3-8B",
        "dstrain verify Qwen/Qwen3-8B --to verify.html",
    ),
    "dstrain selftest": (
        "dstrain selftest",
        "dstrain selftest --preset zero3_offload --keep selftest",
    ),
    "dstrain completion": ("dstrain completion bash >> ~/.bashrc",),
}
"""Command -> lines for a shell."""
OTHER_COMMANDS: Mapping[str, str] = {
    **{name: f"dstrain train --task {name}" for name in ("sft", "dpo", "kto", "rm")},
    "reward": "dstrain train --task rm",
    "pt": "dstrain train --task sft",
    "rlhf": "dstrain train --task dpo",
    "resume": "dstrain train RECIPE, which continues where the run is",
    "merge": "dstrain export RUN --to FOLDER --merge-lora",
    "merge-lora": "dstrain export RUN --to FOLDER --merge-lora",
    "infer": "dstrain generate RUN --prompt TEXT",
    "eval": "dstrain evaluate RUN --data FILE",
    "preprocess": "dstrain prepare RECIPE",
    "webchat": "dstrain chat RUN",
}
"""Command of another trainer -> the command here."""
DOCUMENTATION = "docs/quickstart.md explains a first run, docs/data.md the data formats, docs/launch.md several hosts."
