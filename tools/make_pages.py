"""Write the pages that come from the code, docs/recipe-keys.md and docs/cli.md: `python -m tools.make_pages`."""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from dstrain.cli import main
from dstrain.cli.options import LaunchOption
from dstrain.config.aliases import read_aliases
from dstrain.config.schema import RunConfig
from dstrain.tasks import builtin_tasks, default_learning_rate, find_task, task_options
from dstrain.tasks.common.task import Option

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by `make pages` (python -m tools.make_pages) from the code: do not edit. -->\n\n"
SHORT_FORMS = {"data.train": "text, or list of texts and blocks", "data.eval": "text or block"}
"""Types of keys that also take a text, which the schema replaces by a block before it checks them."""
Node = Mapping[str, Any]
"""A node of a JSON schema."""

KEYS_INTRO = """\
```bash
dstrain init sft --to sft.yaml                      # a starter recipe with the usual keys
dstrain train sft.yaml --dry-run                    # prints the recipe with every key
dstrain train sft.yaml --set optim.lr=2e-5          # sets a key by its dotted name; overrides the file
```

This page lists every key of a recipe, from the schema that checks it. dstrain refuses a key that is not here, and
suggests the nearest one. `--set model.lora.rank=8` creates the block `lora` if the file has none. If the type of a key
is text, `--set` takes the value unchanged (`--set launch.slurm.time=24:00:00`). Other values are YAML, with a list in
brackets: `--set optim.betas=[0.9,0.95]`. `--set KEY=null` sets a key to null; if the key cannot be null, it removes the
key from the recipe.

Blocks are nested in YAML:

```yaml
task: sft
model: {path: /models/llama, lora: {rank: 8}}
data: {train: train.jsonl}
optim: {lr: 1.0e-4}
```

"empty" is `null` in YAML: the key is not set.
"""
CLI_INTRO = """\
```bash
dstrain recipes                      # lists the packaged recipes
dstrain train demo-rm --dry-run      # prints recipe, DeepSpeed JSON and launch command; starts nothing
```

This page lists every command and option, as `dstrain COMMAND --help` prints them. You can write options with `-` or
`_`. RECIPE is a YAML file or the name of a packaged recipe (`dstrain recipes`). Without RECIPE dstrain reads
`./recipe.yaml`; with `--task` and without RECIPE it reads only the command line. RUN is a run folder.

Exit codes: 0 done; 1 the run failed; 2 bad usage, recipe, preset or data, before any process group starts; 75 stopped
by a signal after a complete checkpoint was written: the same command resumes ([Exit codes](launch.md#exit-codes)).

A shell can complete commands, options, recipes, presets, tasks, model shapes and the keys of `--set`:

```bash
dstrain completion bash >> ~/.bashrc
dstrain completion zsh >> ~/.zshrc        # after compinit
dstrain completion fish > ~/.config/fish/completions/dstrain.fish
```
"""
ALIASES_INTRO = """\
dstrain refuses a recipe with one of these names, and the error says what the row says. A `*` stands for any letters.
`dstrain init --from THEIR.yaml --to recipe.yaml` converts a whole file.
[Coming from other trainers](coming-from.md) compares whole recipes.
"""


def escape_cell(text: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*.", "\\*.")


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def describe_range(node: Node) -> str:
    """Return the limits of a number in words; empty if it has none."""
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    below = None if below == 2**31 else below  # the largest integer is no limit that a reader needs
    parts = [
        f"from {low:g}" if low is not None else f"above {above:g}" if above is not None else "",
        f"to {high:g}" if high is not None else f"to below {below:g}" if below is not None else "",
    ]
    return " ".join(filter(None, parts)).replace("e+0", "e")


def describe_type(node: Node, defs: Mapping[str, Node]) -> str:
    """Return the type of a value in words, from its JSON schema."""
    if "$ref" in node:
        node = defs[node["$ref"].rpartition("/")[2]]
    if "enum" in node or "const" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    if choices := node.get("anyOf"):
        names = [describe_type(one, defs) for one in choices if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "prefixItems" in node:
        return "list of " + str(len(node["prefixItems"])) + " numbers"
    kind = str(node.get("type", "any value"))
    if kind == "array":
        inner = describe_type(node.get("items", {}), defs)
        return "list of blocks" if inner == "block" else "list of texts" if inner == "text" else f"list of {inner}"
    if kind == "object":
        return "block" if "properties" in node else "map"
    name = {"string": "text", "boolean": "`true`, `false`", "number": "number", "integer": "whole number"}.get(
        kind, kind
    )
    limits = describe_range(node) if kind in ("number", "integer") else ""
    return f"{name} {limits}".rstrip()


def describe_default(node: Node, defs: Mapping[str, Node], required: bool) -> str:
    """Return the default of a key as YAML writes it."""
    if required:
        return "required"
    value = node.get("default")
    if value is None:
        return "empty"
    if isinstance(value, dict) and find_block(node, defs) is not None and "additionalProperties" not in node:
        return "the block below"
    written = json.dumps(value) if not isinstance(value, str) else value
    return f"`{written}`" if written else "empty"


def find_block(node: Node, defs: Mapping[str, Node]) -> Node | None:
    """Return the block of keys that a value is, or may be; None if it is none."""
    for one in [node, *node.get("anyOf", []), node.get("items", {}), node.get("additionalProperties", {})]:
        if isinstance(one, dict) and "$ref" in one:
            block = defs[one["$ref"].rpartition("/")[2]]
            return block if "properties" in block else None
    return None


def iter_blocks(name: str, block: Node, defs: Mapping[str, Node]) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Yield (dotted name, its description, rows of its keys) of a block and of the blocks in it."""
    rows, nested = [], []
    for key, node in block["properties"].items():
        dotted = f"{name}.{key}" if name else key
        inner = find_block(node, defs)
        effect = escape_cell(str(node.get("description") or (inner or {}).get("description", "")))
        default = describe_default(node, defs, key in block.get("required", ()))
        kind = SHORT_FORMS.get(dotted) or describe_type(node, defs)
        rows.append([f"`{key}`", escape_cell(kind), escape_cell(default), effect])
        if inner is not None:
            several = "items" in node or "additionalProperties" in node
            nested.append(
                (f"{dotted}.NAME" if "additionalProperties" in node else f"{dotted}[]" if several else dotted, inner)
            )
    yield name, str(block.get("description", "")), rows
    for dotted, inner in nested:
        yield from iter_blocks(dotted, inner, defs)


def describe_option(owner: type, option: Option) -> str:
    """Return the type of a task's option in words; its annotation where pydantic has no schema of it."""
    try:
        schema = TypeAdapter(typing.get_type_hints(owner, include_extras=True)[option.name]).json_schema()
        return "block" if option.nested else describe_type(schema, schema.get("$defs", {}))
    except (NameError, KeyError, PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        return f"`{option.type}`"


def option_rows(owner: type, options: Sequence[Option], prefix: str = "") -> Iterator[list[str]]:
    """Yield the rows of a task's options, those of its blocks after them with dotted names."""
    for option in options:
        default = "empty" if option.default in (None, {}) else f"`{json.dumps(option.default).strip(chr(34))}`"
        yield [
            f"`{prefix}{option.name}`",
            escape_cell(describe_option(owner, option)),
            escape_cell(default),
            escape_cell(option.help),
        ]
    for option in options:
        if option.nested:
            hint = typing.get_type_hints(owner)[option.name]
            block = next(one for one in (hint, *typing.get_args(hint)) if hasattr(one, "__dataclass_fields__"))
            yield from option_rows(block, option.nested, f"{prefix}{option.name}.")


def render_task(name: str) -> str:
    """Return the section of a task's options."""
    task = find_task(name)
    rates = [f"{default_learning_rate(task, lora):g}" for lora in (False, True)]
    lora = task.default_lora
    adapters = (
        "" if lora is None else f" By default it trains LoRA adapters (`rank: {lora.rank}, alpha: {lora.alpha:g}`)."
    )
    text = f"### options of {name}\n\nDefault of `optim.lr`: {rates[0]}, with `model.lora` {rates[1]}.{adapters}\n\n"
    rows = list(option_rows(task, task_options(task)))
    return text + (render_table(("option", "type", "default", "effect"), rows) if rows else "No options.\n")


def render_keys() -> str:
    """Return the page of all recipe keys and task options."""
    schema = RunConfig.model_json_schema()
    parts = ["# Recipe keys\n\n" + NOTE + KEYS_INTRO]
    for name, description, rows in iter_blocks("", schema, schema["$defs"]):
        title = f"`{name}`" if name else "The recipe itself"
        text = f"{description}\n\n" if name else ""
        parts.append(f"## {title}\n\n{text}" + render_table(("key", "type", "default", "effect"), rows))
    parts.append("## Options of the tasks\n\nKeys of the block `options`; [Tasks](tasks/index.md) explains them.\n")
    parts += [render_task(name) for name in builtin_tasks()]
    parts.append("## Names of other trainers\n\n" + ALIASES_INTRO + "\n" + render_aliases())
    return "\n".join(parts)


def render_aliases() -> str:
    """Return a table for each kind of answer to a key of another trainer."""
    rows: dict[str, dict[str, list[str]]] = {}
    for name, answer in read_aliases().items():
        same = " or ".join(f"`{str(value).lower()}`" for value in answer.values)
        shown = f"`{name}`" + (f" ({same})" if same else "")
        rows.setdefault(answer.kind, {}).setdefault(answer.text, []).append(shown)
    titles = {"keys": "here", "by value": "not supported, except for a value in brackets, which is what dstrain does"}
    tables = [
        render_table(
            (titles.get(kind, kind), "names"),
            [[text if re.search("[ `]", text) else f"`{text}`", ", ".join(names)] for text, names in found.items()],
        )
        for kind, found in rows.items()
    ]
    return "\n".join(tables)


def option_row(context: click.Context, option: click.Option) -> list[str]:
    """Return the row of a command's option."""
    record = option.get_help_record(context) or ("", "")
    spelled = option.opts[0] + ("" if option.is_flag else f" {option.make_metavar(context)}".replace(" RANGE", ""))
    text = re.sub(r"\s*\[(default|required|x)[^\]]*\]", "", record[1])
    default = (
        "" if option.is_flag or option.default in (None, "", ()) or not option.show_default else str(option.default)
    )
    return [f"`{spelled}`", "required" if option.required else f"`{default}`" if default else "", text]


def render_command(name: str, command: click.Command) -> str:
    """Return the section of a command; of a group, those of its commands."""
    if isinstance(command, click.Group):
        return "\n".join(render_command(f"{name} {key}", one) for key, one in sorted(command.commands.items()))
    context = click.Context(command, info_name=name)
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    own = [one for one in options if not isinstance(one, LaunchOption)]
    usage = " ".join(command.collect_usage_pieces(context))
    text = (
        f"## {name}\n\n```text\n{name} {usage}\n```\n\n"
        + "\n".join(line.strip() for line in (command.help or "").splitlines()).strip()
        + "\n"
    )
    if own:
        rows = [[escape_cell(cell) for cell in option_row(context, one)] for one in own]
        text += "\n" + render_table(("option", "default", "effect"), rows)
    return text + ("\nAlso the [launch options](#launch-options).\n" if len(own) < len(options) else "")


def render_cli() -> str:
    """Return the page of all commands."""
    train = main.commands["train"]
    context = click.Context(train, info_name="dstrain train")
    launch = [one for one in train.params if isinstance(one, LaunchOption)]
    rows = [[escape_cell(cell) for cell in option_row(context, one)] for one in launch]
    parts = ["# Commands\n\n" + NOTE + CLI_INTRO]
    parts += [render_command(f"dstrain {name}", one) for name, one in sorted(main.commands.items()) if not one.hidden]
    parts.append(
        "## Launch options\n\nProcesses and hosts; [Starting a run](launch.md) explains them.\n\n"
        + render_table(("option", "default", "effect"), rows)
    )
    return "\n".join(parts)


PAGES = {"docs/recipe-keys.md": render_keys, "docs/cli.md": render_cli}
"""Path of each page that this tool writes -> its text."""

if __name__ == "__main__":
    for path, render in PAGES.items():
        (ROOT / path).write_text(render(), encoding="utf-8")
        print(path, file=sys.stderr)
