"""Click command classes of dstrain: help with examples, and errors as one message with their exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

import click

from dstrain.cli.examples import DOCUMENTATION, EXAMPLES
from dstrain.cli.options import LAUNCH_OPTION_NAMES
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
from dstrain.process_setup import discard_closed_output, prepare_process

UNSUPPORTED_COMMANDS = {
    "doctor": "check a recipe on this machine with `dstrain train RECIPE --dry-run`",
}
"""Planned commands, and what to use until they exist."""


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
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # of the group's own --help; other commands end in `invoke`
            if (known := explain_system_error(error)) is None:
                raise
            echo(f"error: {known}", err=True)
            sys.exit(known.exit_code)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in UNSUPPORTED_COMMANDS:
            raise UsageError(f"dstrain {args[0]}: not supported yet; {UNSUPPORTED_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke_checked(ctx)
        except BrokenPipeError:
            # click would exit with 1, which says that a run failed. A broken pipe to another process is such a failure.
            if not discard_closed_output():
                raise
            ctx.exit(EXIT_OUTPUT_CLOSED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            known = error if isinstance(error, DstrainError) else explain_system_error(error)
            _exit_with_error(ctx, error, known)

    def _invoke_checked(self, ctx: click.Context) -> Any:
        if ctx.params.pop("debug", False):
            os.environ[DEBUG_ENV] = "1"
        is_debug()
        if sys.flags.optimize > 1:
            problem = "Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which transformers needs"
            raise UsageError(f"{problem}; unset PYTHONOPTIMIZE, or set it to 1")
        return super().invoke(ctx)


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
