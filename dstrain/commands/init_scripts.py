"""Commands of other trainers in shell scripts, for `dstrain init --from`. Nothing of a script is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dstrain.config.aliases import find_answer
from dstrain.config.read import read_text, read_yaml
from dstrain.errors import SourceMap, UsageError, one_line
from dstrain.files import not_file_reason

_COMMANDS = {
    "llamafactory-cli": "LLaMA-Factory", "swift": "ms-swift", "megatron": "ms-swift", "trl": "TRL", "axolotl": "axolotl",
}  # fmt: skip
_COMMAND = re.compile(
    r"(?:^|\s)(?:(llamafactory-cli|swift|megatron|trl|axolotl)\s+(train|sft|pt|rlhf|dpo|kto|reward|grpo|rloo)\b"
    r"|\S*src/(train)\.py(?=\s)|\S*?(sft|rlhf|dpo|kto|reward|prm|grpo|ppo)\w*\.py(?=\s))"
)
"""A trainer's command, LLaMA-Factory's script, or a script of TRL's form, or one of ms-swift's."""
_LAUNCH_KEYS = ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
"""Keys of accelerate's deepspeed_config that say what ds_config is."""
SHELL_VALUE = object()
"""Stands for a value that a shell would fill in."""


def read_command(path: Path) -> tuple[SourceMap, str]:
    """Return the options of the first command of a trainer in a shell script, and the trainer. Raises UsageError.

    Nothing is run.
    """
    reason = not_file_reason(path)
    if reason:
        raise UsageError(f"{path}: {reason}; give the script's file")
    lines = re.sub(r"\\\n", " \x00", read_text(path)).split("\n")  # \0 stands for the end of a line that goes on
    for index, line in enumerate(lines):
        command = _COMMAND.search(line.replace("\x00", " "))
        if command is None or line.lstrip().startswith("#"):
            continue
        place = index + 1 + sum(other.count("\x00") for other in lines[:index])
        try:
            before, words = (
                shlex.split(part.replace("\x00", " ")) for part in (line[: command.start()], line[command.end() :])
            )
        except ValueError as error:
            raise UsageError(
                f"{path}:{place}: the command cannot be read ({error}); check its quotation marks"
            ) from None
        source = _read_words(path, f"{path.name}:{place}", command[2] or command[3] or command[4], words)
        if "accelerate" in before:
            launch = _read_launch(_read_options(before)[0])
            if launch:
                source.values["accelerate_config"] = launch
                source.locations["accelerate_config",] = f"{path.name}:{place}"
        return source, _find_trainer(command)
    known = "`swift sft`, `llamafactory-cli train`, `axolotl train`, `trl dpo` and a script named as dpo.py"
    raise UsageError(f"{path}: has no command that is known ({known} are); give the YAML file of the training")


def _find_trainer(command: re.Match[str]) -> str:
    """Return the trainer that a command or the script's path names; TRL for a script of another path."""
    if command[1]:
        return _COMMANDS[command[1]]
    if command[3]:
        return _COMMANDS["llamafactory-cli"]
    return _COMMANDS["swift" if "swift/" in command[0] else "trl"]


def _read_options(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a command, as argparse and HfArgumentParser spell them, and the words before them."""
    given: dict[str, list[str]] = {}
    plain: list[str] = []
    last = plain
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if equals:
                last = [value]
            elif name.startswith("no_") and find_answer((name,)) is None:
                name, last = name.removeprefix("no_"), ["false"]
            else:
                last = []
            given[name] = last
        elif word in ("&&", "||", "|", ";", ">", "2>&1") or word.startswith("#"):
            break
        else:
            last.append(word)
    return {name: _parse_words(values) for name, values in given.items()}, plain


def _read_launch(options: Mapping[str, Any]) -> Any:
    """Return the file that `accelerate launch` is given, or its options in the form of such a file."""
    file = options.get("config_file")
    if file:
        return file
    block = {name: options[name] for name in _LAUNCH_KEYS if name in options}
    return {"deepspeed_config": block, "mixed_precision": options.get("mixed_precision")} if block else None


def _read_words(path: Path, place: str, command: str, words: Iterable[str]) -> SourceMap:
    """Return the options of a command as a file would have them; those of a YAML file that it names are under them."""
    parsed, plain = _read_options(words)
    for word in plain:
        name, equals, value = word.partition("=")
        if equals:  # as LLaMA-Factory reads it
            parsed[name] = _parse_words([value])
        elif word.endswith((".yaml", ".yml", ".json")):
            parsed["config"] = word
    source = SourceMap(path.name, parsed, {(name,): place for name in parsed})
    config = parsed.pop("config", None)
    if isinstance(config, str):
        file = find_file(config, path)
        if file is None:
            raise UsageError(f"{place}: names {one_line(config)}, which is not here; give that file to --from")
        below = read_yaml(file, "1.1")
        source.values, source.locations = {**below.values, **parsed}, {**below.locations, **source.locations}
    if command == "rlhf":
        source.values.setdefault("rlhf_type", "dpo")
    elif command != "train":
        source.values.setdefault("stage", command)
    return source


def _parse_words(words: list[str]) -> Any:
    """Return the value of an option: true for none, a number, a text, or a list."""
    if any("$" in word or "`" in word for word in words):
        return SHELL_VALUE
    if not words:
        return True
    try:
        values = [_parse_word(word) for word in words]
    except (yaml.YAMLError, ValueError):
        values = list(words)
    return values[0] if len(values) == 1 else values


def _parse_word(word: str) -> Any:
    """Return a word as YAML reads it; a word with a line break or a sign of YAML's syntax is text."""
    if "\n" in word or re.search(r"[:#&*!]", word):
        return word
    return yaml.safe_load(word)


def find_file(name: str, other: Path) -> Path | None:
    """Return the file of that name here, or in the folder of another file or one above it."""
    here = Path.cwd()
    folders = (
        folder.relative_to(here) if folder.is_relative_to(here) else folder for folder in other.resolve().parents
    )
    for path in (Path(name), *(folder / name for folder in folders)):
        if path.is_file():
            return path
    return None
