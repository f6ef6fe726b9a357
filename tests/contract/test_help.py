"""Every --help shows defaults and examples, and every example is a command that click accepts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.cli.command_group import EXAMPLES
from dstrain.cli.options import SCRIPT_ENV
from dstrain.commands.recipe_args import list_builtin_recipes
from dstrain.preset import preset_names
from dstrain.tasks import builtin_tasks
from tests.vocabulary import invoke


def walk(command: click.Command, name: str = "dstrain") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for word, child in command.commands.items():
            yield from walk(child, f"{name} {word}")


COMMANDS = dict(walk(main))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_of_its_command(name: str) -> None:
    words = name.split()[1:]
    shown = invoke(*words, "--help").output
    lines = [line.strip() for line in shown.partition("Examples:\n")[2].splitlines()]
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        assert example in lines
        assert example.startswith(name)


def test_there_are_no_examples_of_commands_that_do_not_exist() -> None:
    assert set(EXAMPLES) <= set(COMMANDS)


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_is_accepted(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed as typed, without redirections; files in it need not exist."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: Path(value))
    words = shlex.split(re.split(" [<>]", example)[0])[1:]
    context = main.make_context("dstrain", words, resilient_parsing=False)
    command: click.Command = main
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    assert not context.args


def shown_defaults(command: click.Command) -> Iterator[tuple[str, Any]]:
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            default = param.to_info_dict()["default"]
            if default is not None and default is not False and default != ():
                yield param.opts[-1], default


@pytest.mark.parametrize("name", COMMANDS)
def test_every_default_is_in_the_help(name: str) -> None:
    shown = " ".join(invoke(*name.split()[1:], "--help").output.split())
    for option, default in shown_defaults(COMMANDS[name]):
        own = shown.partition(f" {option}")[2].partition(" --")[0]
        assert "[default: " in own, f"{name} {option}: {default!r}"


def test_examples_are_whole_on_a_narrow_terminal() -> None:
    narrow = CliRunner().invoke(main, ["plan", "--help"], terminal_width=40).output
    for example in EXAMPLES["dstrain plan"]:
        assert f"  {example}\n" in narrow


def complete(*words: str) -> list[str]:
    found = ShellComplete(main, {}, "dstrain", SCRIPT_ENV).get_completions([*words[:-1]], words[-1])
    return [item.value for item in found if item.type == "plain"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("pl",), ["plan"]),
        (("train", "demo-"), ["demo-rm", "demo-sft", "demo-vlm"]),
        (("train", "x.yaml", "--ds-config", "zero3_"), [name for name in preset_names() if name.startswith("zero3_")]),
        (("train", "--ds-config", "a"), ["auto"]),
        (("train", "--task", ""), builtin_tasks()),
        (("train", "--set", "optim.w"), ["optim.weight_decay=", "optim.warmup="]),
        (("train", "--allow-change", "optim.lr"), ["optim.lr"]),
        (("train", "--dry"), ["--dry-run"]),
        (("train", "--launcher", "sl"), ["slurm"]),
        (("evaluate", "run", "--step", "b"), ["best"]),
        (("plan", "--model-shape", "llama-3.1-7"), ["llama-3.1-70b"]),
        (("presets", "zero2_f"), ["zero2_fp16"]),
        (("recipes", ""), list_builtin_recipes()),
        (("tasks", "d"), ["distill", "docqa", "dpo"]),
        (("init", "k"), ["kto"]),
        (("data", "c"), ["check"]),
        (("data", "check", "x.jsonl", "--task", "r"), ["rm"]),
        (("selftest", "--preset", "zero1"), ["zero1"]),
        (("completion", "f"), ["fish"]),
    ],
)
def test_values_are_completed(words: tuple[str, ...], wanted: list[str]) -> None:
    assert sorted(complete(*words)) == sorted(wanted)


def test_files_are_completed_where_a_name_or_a_file_fits() -> None:
    found = ShellComplete(main, {}, "dstrain", SCRIPT_ENV).get_completions(["train"], "demo-r")
    assert [item.type for item in found] == ["file", "plain"], "bash forgets the names before a file"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_asks_dstrain(shell: str) -> None:
    script = invoke("completion", shell).output
    assert f"{SCRIPT_ENV}={shell}_complete" in script
    assert "dstrain" in script


def test_bash_completes_a_recipe(tmp_path: Path) -> None:
    """With the printed script in a real bash, and a `dstrain` on PATH that is this one."""
    program = tmp_path / "dstrain"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dstrain "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(invoke("completion", "bash").output)
    test = f"""
    PATH="{tmp_path}:$PATH"; source "{tmp_path}/script"; shopt -s expand_aliases
    compopt() {{ :; }}
    COMP_WORDS=(dstrain train demo-s); COMP_CWORD=2; _dstrain_completion dstrain; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", test], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "demo-sft", done.stderr
