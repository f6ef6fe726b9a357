"""dstrain init --from: a recipe from the configuration of TRL, LLaMA-Factory, axolotl, ms-swift or align-anything."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dstrain.commands.init import to_yaml
from dstrain.commands.init_prompts import CHATML, PromptFormat, read_prompt_format
from dstrain.config.aliases import (
    DATASET_BLOCKS,
    LOSS_TYPES,
    find_answer,
    find_names,
    find_trainer,
    find_value,
    iter_foreign_keys,
    read_aliases,
    read_table,
    read_values,
)
from dstrain.config.read import MAX_RECIPE_BYTES, check_values, is_number_key, list_keys, read_text, read_yaml
from dstrain.config.schema import RunConfig
from dstrain.data.formats.messages import ROLE_ALIASES
from dstrain.data.sources.hub import is_hub_name
from dstrain.data.sources.open import open_source
from dstrain.errors import (
    Fault,
    PresetError,
    RecipeError,
    TaskError,
    UsageError,
    first_names,
    one_line,
    suggest_name,
)
from dstrain.files import not_file_reason, read_limited
from dstrain.preset.check import read_json
from dstrain.preset.rules import get_offload_device, get_zero_stage
from dstrain.report.run_history import is_number
from dstrain.source_map import KeyPath, SourceMap, dotted_name, lookup
from dstrain.tasks import find_task, make_task, task_options

_TASK_FLAGS = {"reward_model": "rm", "process_reward_model": "prm"}
_SAME_COLUMNS = {"messages": ("conversations", "conversation"), "conversations": ("messages", "conversation")}
"""Name in a record -> columns that are read alike."""
_MESSAGE_KEYS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
_LAUNCH_KEYS = ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
"""Keys of accelerate's deepspeed_config that say what ds_config is."""
_NO_INFO = ", in no dataset_info.json here"
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt")
_LEARNT_KEYS = ("model", "task", "optim", "options", "batch", "data.columns", "data.train", "the `weight`")
"""Recipe keys that change what is learnt."""
_AS_NOTES = (
    "data.columns", "model.config", "model.lora", "model.freeze", "task", "optim.groups", "eval.generate", "model",
    "eval.generate.samples", "eval.generate.max_new_tokens", "data.eval", "data.train",
)  # fmt: skip
"""Recipe keys whose value cannot be taken over as it is."""
_TOP_KEYS = ("precision", "steps", "epochs", "seed", "deterministic", "timeout_minutes")
"""Keys outside of blocks that are spelled alike here."""
_TEXT_KEYS = ("model.path", "model.revision", "model.tokenizer", "model.processor", "log.wandb", "eval.metric")
_VISION_KEYS = re.compile(
    "image_|video_|max_pixels|freeze_(vision|multi_modal|mm|vit|aligner|language|llm)|processor_type"
)
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PLAIN_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_COMMANDS = {
    "llamafactory-cli": "LLaMA-Factory", "swift": "ms-swift", "megatron": "ms-swift", "trl": "TRL", "axolotl": "axolotl",
}  # fmt: skip
_COMMAND = re.compile(
    r"(?:^|\s)(?:(llamafactory-cli|swift|megatron|trl|axolotl)\s+(train|sft|pt|rlhf|dpo|kto|reward|grpo|rloo)\b"
    r"|\S*src/(train)\.py(?=\s)|\S*?(sft|rlhf|dpo|kto|reward|prm|grpo|ppo)\w*\.py(?=\s))"
)
"""A trainer's command, LLaMA-Factory's script, or a script of TRL's form, or one of ms-swift's."""
_INFO_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool", "function_tag": "assistant",
}  # fmt: skip
"""Tag of LLaMA-Factory's dataset_info.json -> the names that are read here, or the role that its value is here."""
_LINE_BREAK = (
    "the line break that a template writes after the end of a turn is learnt there; here an answer ends with its end"
)
_SHELL_VALUE = object()
"""Stands for a value that a shell would fill in."""


@dataclass
class ConvertedRecipe:
    """A recipe from another trainer's configuration."""

    text: str
    """The recipe, in YAML."""
    trainer: str
    to_fill_in: list[str]
    """Recipe keys whose value the file does not have."""
    differences: list[str]
    """What is learnt otherwise than there, or may be: names of their keys with the reason."""

    def describe(self) -> str:
        """Return what the user is to do, in one line."""
        todo = f"fill in {first_names(self.to_fill_in)}" if self.to_fill_in else "read the comments"
        return f"from a configuration of {self.trainer}; {todo}"


def convert_file(path: Path, task: str | None = None) -> ConvertedRecipe:
    """Convert a YAML or JSON file of another trainer, or a shell script that starts one.

    `task`: where the file does not say it. Raises UsageError for a file that is none, and where the recipe would train
    another method or is not valid.
    """
    if path.suffix in (".sh", ".bash"):
        source, trainer = read_command(path)
    else:
        source, trainer = read_yaml(path), None
    return _Converter(path, source, task, trainer or _check_trainer(path, source)).convert()


def read_command(path: Path) -> tuple[SourceMap, str]:
    """Return the options of the first command of a trainer in a shell script, and the trainer. Raises UsageError.

    Nothing is run.
    """
    if reason := not_file_reason(path):
        raise UsageError(f"{path}: {reason}; give the script's file")
    lines = re.sub(r"\\\n", " \x00", read_text(path)).split("\n")  # \0 stands for the end of a line that goes on
    for index, line in enumerate(lines):
        if line.lstrip().startswith("#") or not (found := _COMMAND.search(line.replace("\x00", " "))):
            continue
        place = index + 1 + sum(other.count("\x00") for other in lines[:index])
        try:
            before, words = (
                shlex.split(part.replace("\x00", " ")) for part in (line[: found.start()], line[found.end() :])
            )
        except ValueError as error:
            raise UsageError(
                f"{path}:{place}: the command cannot be read ({error}); check its quotation marks"
            ) from None
        source = _read_words(path, f"{path.name}:{place}", found[2] or found[3] or found[4], words)
        if "accelerate" in before and (launch := _read_launch(_read_options(before)[0])):
            source.values["accelerate_config"] = launch
            source.locations["accelerate_config",] = f"{path.name}:{place}"
        return source, _COMMANDS[
            found[1] or ("llamafactory-cli" if found[3] else "swift" if "swift/" in found[0] else "trl")
        ]
    known = "`swift sft`, `llamafactory-cli train`, `axolotl train`, `trl dpo` and a script named as dpo.py"
    raise UsageError(f"{path}: has no command that is known ({known} are); give the YAML file of the training")


def _read_options(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a command, as argparse and HfArgumentParser spell them, and the words before them."""
    given: dict[str, list[str]] = {}
    plain: list[str] = []
    last = plain
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            is_off = name.startswith("no_") and not equals and find_answer((name,)) is None
            last = given[name.removeprefix("no_") if is_off else name] = ["false"] if is_off else [value] * bool(equals)
        elif word in ("&&", "||", "|", ";", ">", "2>&1") or word.startswith("#"):
            break
        else:
            last.append(word)
    return {name: _parse_words(values) for name, values in given.items()}, plain


def _read_launch(options: Mapping[str, Any]) -> Any:
    """Return the file that `accelerate launch` is given, or its options in the form of such a file."""
    if file := options.get("config_file"):
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
    if isinstance(config := parsed.pop("config", None), str):
        file = _find_file(config, path)
        if file is None:
            raise UsageError(f"{place}: names {one_line(config)}, which is not here; give that file to --from")
        below = read_yaml(file)
        source.values, source.locations = {**below.values, **parsed}, {**below.locations, **source.locations}
    if command != "train":
        source.values.setdefault("stage" if command != "rlhf" else "rlhf_type", "dpo" if command == "rlhf" else command)
    return source


def _parse_words(words: list[str]) -> Any:
    """Return the value of an option: true for none, a number, a text, or a list."""
    if any("$" in word or "`" in word for word in words):
        return _SHELL_VALUE
    try:
        values = [
            yaml.safe_load(word) if "\n" not in word and not re.search(r"[:#&*!]", word) else word for word in words
        ]
    except (yaml.YAMLError, ValueError):
        values = list(words)
    return True if not values else values[0] if len(values) == 1 else values


def _check_trainer(path: Path, source: SourceMap) -> str:
    """Return whose configuration a file is. Raises UsageError where it is none of a training."""
    values, name = source.values, source.name
    if "zero_optimization" in values:
        raise UsageError(f"{name}: is a DeepSpeed JSON; `dstrain presets --adopt {path}` converts it")
    if "compute_environment" in values or "distributed_type" in values:
        fix = "give the trainer's own file; here --num-gpus, --hostfile and ds_config say where a run is"
        raise UsageError(f"{name}: is a launch configuration of accelerate, which trains nothing; {fix}")
    if values and all(key in RunConfig.model_fields for key in values) and not isinstance(values.get("model"), str):
        raise UsageError(f"{name}: is a recipe of dstrain already; `dstrain train {path}` trains it")
    if {"dist_config", "kernel_config", "peft_config", "quant_config"} & {*values} and "model" in values:
        fix = "write the file in the form of version 0 (model_name_or_path, stage, finetuning_type)"
        raise UsageError(f"{name}: is a file of LLaMA-Factory's version 1, which is not read; {fix}")
    if "export_dir" in values:
        raise UsageError(f"{name}: exports a model; `dstrain export RUN --to FOLDER --merge-lora` does that with a run")
    found = find_trainer(values)
    if found is None:
        known = ", ".join(read_table()["trainers"])
        raise UsageError(f"{name}: is no configuration of {known}; give the file that the trainer was started with")
    return found


@dataclass
class _Converter:
    path: Path
    source: SourceMap
    task: str | None
    """The user's word; `_find_task` sets it where there is none."""
    trainer: str
    values: dict[KeyPath, Any] = field(default_factory=dict)
    """Recipe key -> value."""
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Recipe key -> their key, with `(default)` where the file leaves it out."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Why keys are not in the recipe -> their names."""
    to_fill_in: dict[KeyPath, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Their keys of which the user is told on the terminal."""
    places: dict[str, KeyPath] = field(default_factory=dict)
    """Their keys without blocks -> with them."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """Their keys without blocks that are set -> values."""
    defaults: dict[str, Any] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    """Their keys that are not in the recipe or the notes yet."""
    loss_type: str | None = None
    cut_splits: set[str] = field(default_factory=set)
    """Their splits that are a part of one."""
    unset: list[str] = field(default_factory=list)
    """Their keys whose value means that they are not set."""
    formats: list[tuple[str, PromptFormat]] = field(default_factory=list)
    """Key and format of each of their data sets."""

    def convert(self) -> ConvertedRecipe:
        """Return the recipe. Raises UsageError."""
        self._read_keys()
        self.task = self._find_task()
        self._find_defaults()
        self._convert_adapters()
        self._convert_model()
        self._convert_data()
        self._convert_steps()
        self._convert_intervals()
        self._convert_trackers()
        self._convert_ds_config()
        self._convert_precision()
        for name in list(self.left):
            self._convert_other(name)
        self._note_numbers()
        return self._finish()

    def _read_keys(self) -> None:
        for key in iter_foreign_keys(self.source.values):
            if any(name in DATASET_BLOCKS for name in key[:-1]):
                continue  # read with their block
            name = ".".join(str(part) for part in key if part not in read_table()["blocks"]) or str(key[-1])
            value = lookup(self.source.values, key)
            if value in (None, "", [], {}):
                continue
            if is_unset(name, value):
                self.unset.append(name)
                continue
            if name in self.theirs and self.theirs[name] != value:
                # Without the values: the key may be a token.
                problem = f"is set again with another value, after {self._locate(name)}"
                raise RecipeError(Fault(self.source.get_location(key), problem, "keep one of them"))
            self.places[name], self.theirs[name] = key, value
        self.left = dict.fromkeys(self.theirs)
        for name in [one for one, value in self.theirs.items() if value is _SHELL_VALUE]:
            self.note(name, "its value is the shell's; write it in")

    # Bookkeeping

    def take(self, *names: str) -> tuple[str, Any]:
        """Return the one of these names of a key that is set, and its value or the trainer's default.

        They are not left for `_convert_other`. Raises RecipeError for two of them with different values.
        """
        found = [name for name in names if name in self.theirs and self.theirs[name] is not _SHELL_VALUE]
        for name in names:
            self.left.pop(name, None)
        for name in found[1:]:
            if self.theirs[name] != self.theirs[found[0]]:
                problem = f"is {to_yaml(self.theirs[name])}"
                raise self.conflict(self._locate(name), problem, found[0], self.theirs[found[0]])
        name = (found or [name for name in names if name in self.defaults] or [""])[0]
        return name, self.theirs.get(name, self.defaults.get(name))

    def number(self, *names: str) -> tuple[str, int | float | None]:
        """Return the one of these names that is set, and its value if it is a number above 0."""
        name, value = self.take(*names)
        value = to_number(value)
        return name, value if is_number(value) and value > 0 else None

    def put(self, key: str | KeyPath, value: Any, name: str) -> None:
        """Set a recipe key. Raises RecipeError where another key of theirs gave it another value."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        if path in self.values and self.values[path] != value:
            problem = f"gives {dotted_name(path)} {to_yaml(value)}"
            raise self.conflict(self._locate(name), problem, self.origins[path], self.values[path])
        self.values[path] = value
        self.origins.setdefault(path, name + (" (default)" if name in self.defaults else ""))

    def note(self, name: str, why: str, is_lost: bool = True) -> None:
        """List a key of theirs under the reason for which it is not in the recipe; `is_lost`: the user is told."""
        if name in self.defaults:
            return
        self.left.pop(name, None)
        names = self.notes.setdefault(why, [])
        names += [] if name in names else [name]
        if is_lost:
            self.lost.add(name)

    def conflict(self, where: str, problem: str, other: str, value: Any) -> RecipeError:
        """Return the error for two values of one key."""
        return RecipeError(Fault(where, f"{problem}, but {other} {to_yaml(value)}", "keep one of them"))

    def refuse(self, name: str, fix: str) -> RecipeError:
        """Return the error for a value that a recipe cannot follow."""
        value = self.theirs[name]
        shown = "set" if isinstance(value, (dict, list)) else one_line(str(value))
        return RecipeError(Fault(self._locate(name), f"is {shown}, which is not supported", fix))

    def _locate(self, name: str) -> str:
        return self.source.get_location(self.places[name]) if name in self.places else f"{self.source.name} {name}"

    # Blocks of the recipe

    def _find_task(self) -> str:
        named = [name for name in ("stage", "rl", "rlhf_type") if isinstance(self.theirs.get(name), str)]
        flags = {name: task for name, task in _TASK_FLAGS.items() if self.theirs.get(name) is True}
        name = (named or [*flags] or [""])[0]
        method = str(self.theirs[name]).lower() if named else flags.get(name, "")
        for other in read_table()["init"]["other_methods"]:
            value = self.theirs.get(other)
            if (other, value) in (("num_labels", 1), ("num_labels", 2)) and method in ("rm", "reward", "prm"):
                self.left.pop(other)
            elif value and not str(value).lower().endswith(("causal_lm", "false")) and method not in ("rm", "prm"):
                answer = find_answer((other,))
                what = (
                    f"there are no {answer.text}" if answer and answer.kind == "not supported" else "it is another task"
                )
                raise self.refuse(other, f"{what}; `dstrain tasks` lists what there is")
        if method and find_value("task", method) is None:
            raise self.refuse(
                name, "`dstrain tasks` lists what there is; rounds of DPO are in the recipe iterative-dpo"
            )
        for other in ("stage", "rl", "rlhf_type", "task_type", *flags):
            self.left.pop(other, None)
        origin = name or "no other is named"
        if self.task is not None:
            method, origin = self.task, "TASK"
        elif not method and self.trainer in ("TRL", "align-anything"):
            stems = [word for word in re.split(r"[\W_]+", self.path.stem.lower()) if find_value("task", word)]
            if len(stems) != 1:
                problem = f"does not say the method, which {self.trainer} has in a script"
                fix = f"name the task: `dstrain init dpo --from {shlex.quote(str(self.path))}`"
                raise UsageError(f"{self.source.name}: {problem}; {fix}")
            method, origin = stems[0], "the file's name"
        self.has_images = any(_VISION_KEYS.match(key) for key in self.theirs)
        task = str(find_value("task", method or "sft") or method)
        self.loss_type = method if method in LOSS_TYPES else None
        task = "vlm" if task == "sft" and self.has_images and self.task is None else task
        self.put("task", task, "")
        self.origins[("task",)] = origin
        if self.loss_type is not None:
            self.put("options.loss_type", self.loss_type, "")
            self.origins[("options", "loss_type")] = origin
        name, margin = self.number("gamma") if self.loss_type == "simpo" else ("", None)
        if margin is not None:
            self.put("options.simpo_gamma", margin, name)
        return task

    def _find_defaults(self) -> None:
        known = read_table()["trainers"][self.trainer]
        defaults = dict(known["defaults"])
        for name, rate in known.get("learning_rates", {}).items():  # of a task, or a method
            if name == self.task or name in map(self.theirs.get, find_names("model.lora")):
                defaults["learning_rate"] = rate
        answered = {answer.text for name in self.theirs if (answer := find_answer((name,)))}
        has_passes = {"steps", "epochs"} & answered or "epochs" in self.theirs
        for name, value in defaults.items():
            answer = find_answer((name,))
            is_set = answer is not None and answer.text in answered - {"optim.betas"}
            has_batch = answer is not None and answer.text == "batch.accumulate" and "batch.total" in answered
            is_set |= answer is not None and answer.text == "epochs" and bool(has_passes)
            if not (name in self.theirs or is_set or has_batch):
                self.defaults[name] = value
        self.left |= dict.fromkeys(self.defaults)

    def _convert_adapters(self) -> None:
        name, value = self.take(*find_names("model.lora"), *find_names("model.lora: {}"))
        method = str(value).lower()
        if method not in ("lora", "qlora", "true", "full", "none", "false"):
            raise self.refuse(name, "LoRA and full training are; model.freeze leaves layers as they are")
        widths = {key: self.take(key)[1] for key in ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits")}
        if self.theirs.get("use_bnb") is False:
            widths = {}
        if method not in ("lora", "qlora", "true"):
            for other in list(self.left):
                answer = find_answer((other,))
                if other == "r" or (answer is not None and answer.text.startswith("model.lora")):
                    self.note(other, "it has no effect without adapters", is_lost=False)
                    self.left.pop(other, None)
                    self.defaults.pop(other, None)
            for key in [key for key, width in widths.items() if width and key in self.theirs]:
                self.note(key, "quantized weights are for adapters")
            return
        self.put("model.lora", {}, name)
        rank_name, rank = self.number("lora_rank", "lora_r", "r")
        if rank is not None:
            self.put("model.lora.rank", rank, rank_name)
            if self.trainer == "LLaMA-Factory" and "lora_alpha" not in self.theirs:
                self.put("model.lora.alpha", 2 * rank, f"2 x {rank_name}")
        linear, is_linear = self.take("lora_target_linear")
        name, targets = self.take("lora_target", "lora_target_modules", "target_modules", "target_regex")
        if isinstance(targets, str) and re.fullmatch(r"[\w.-]+([,\s]+[\w.-]+)*", targets):
            targets = re.split(r"[,\s]+", targets)
        if is_linear is True or targets in (["all"], ["all-linear"], ["all_linear"]):
            self.put("model.lora.targets", "all-linear", linear if is_linear is True else name)
        elif targets:
            self.put("model.lora.targets", targets, name)
        elif self.trainer == "TRL":
            why = "PEFT chooses there, often q_proj and v_proj; here model.lora.targets is all-linear"
            self.note("lora_target_modules (default)", why)
        for key, width in widths.items():
            bits = key[8] if width is True else None if key.startswith("load") else width
            if bits and (ours := self._choose("model.quantize", bits, key)):
                self.put("model.quantize", ours, key)
        if method == "qlora" and ("model", "quantize") not in self.values:
            self.put("model.quantize", "nf4", "adapter" if "adapter" in self.theirs else "finetuning_type")
        name, folder = self.take("adapter_name_or_path", "lora_model_dir", "adapters")
        is_new = self.take("create_new_adapter")[1] is True
        if isinstance(folder, str) and Path(folder).exists():
            self.put("model.path", folder, name)
            self.put("model.lora.create_new_adapter", is_new, name)
        elif folder:
            self.to_fill_in["model", "path"] = f"the adapter's folder, {one_line(str(folder))}, is not here"

    def _convert_model(self) -> None:
        name, path = self.take("model_name_or_path", "base_model", "model", "model_id_or_path")
        if {("model", "path")} & {*self.values, *self.to_fill_in}:
            self.note(name, "the adapter's folder names its base", is_lost=False)
        elif isinstance(path, str):
            self.put("model.path", path, name)
        else:
            self.to_fill_in["model", "path"] = "folder or Hub id of the model"
        name, is_trusted = self.take("trust_remote_code")
        if is_trusted is True:  # often a line that was copied
            self.note(
                name,
                "it runs Python code of the model's folder; write model.trust_remote_code: true if you mean that",
                False,
            )
        for other in ("chat_template_jinja", "chat_template_path", "chat_template", "template"):
            name, value = self.take(other)
            if isinstance(value, str) and ("{%" in value or "{{" in value or value.endswith(".jinja")):
                self.put("model.chat_template", value, name)
            elif value == "chatml" and self.trainer == "axolotl":
                self.put("model.chat_template", CHATML, name)
            elif name:
                why = "the tokenizer's own chat template is used; write model.chat_template: FILE (Jinja) for another"
                self.note(name, why, value not in ("tokenizer_default", True))
        name, variables = self.take("chat_template_kwargs")
        for key, value in variables.items() if isinstance(variables, dict) else ():
            self.put(("model", "chat_template_kwargs", str(key)), value, name)
        name, thinking = self.take("enable_thinking")
        if isinstance(thinking, bool):
            self.put("model.chat_template_kwargs.enable_thinking", thinking, name)
        frozen: dict[str, str] = {}
        for part in ("vision", "projector", "language"):
            names = [*find_names(f"model.freeze: [{part}]")]
            names += find_names("model.freeze: [vision, projector]") if part != "language" else []
            given = {key: self.take(key)[1] for key in names if key in self.theirs}
            if any(value is True for value in given.values()):
                frozen[part] = ", ".join(given)
            elif not given and part in read_table()["trainers"][self.trainer].get("freeze", ()):
                frozen[part] = f"{self.trainer}'s default"
        if frozen and self.has_images:
            self.put("model.freeze", list(frozen), "; ".join(dict.fromkeys(frozen.values())))
        name, value = self.take("freeze_parameters")
        if isinstance(value, list):
            self.put("model.freeze", value, name)
        name, value = self.take("disable_gradient_checkpointing")
        if isinstance(value, bool):
            self.put("model.gradient_checkpointing", not value, name)
        for width in ("bf16", "fp16", "fp32"):
            for other in find_names(f"precision: {width}"):
                if self.theirs.get(other) in (True, "full"):
                    self.put("precision", width, self.take(other)[0])
        name, value = self.take("torch_dtype", "dtype", "compute_dtype")
        if ("precision",) not in self.values and (width := find_value("precision", value)):
            self.put("precision", width, name)

    def _convert_data(self) -> None:
        names = [name for name in find_names("data.train") if name in self.theirs]
        name, train = self.take(names[0]) if names else ("", None)
        where = {key: self.take(*keys)[1] for key, keys in read_table()["init"]["train"].items()}
        if where["data_files"] and not train:
            name, train = "train_data_files", "json"
        found = self._read_datasets(name, train, where)
        self._convert_formats()
        if not all(str(one).startswith("FILL IN") for one in found):
            self.put("data.train", found if len(found) > 1 else found[0], name)
        else:
            self.to_fill_in.setdefault(("data", "train"), "a file, or org/name of a dataset on the Hub")
        self.take("dataset_dir", "data_dir")
        self.take("media_dir")
        eval_keys = [
            key
            for key in find_names("data.eval")
            if key in self.theirs and (key, self.trainer) != ("eval_dataset", "ms-swift")
        ]
        eval_name, held_out = self.take(eval_keys[0]) if eval_keys else ("", None)
        where = {
            "name": where["name"],
            **{key: value for key, keys in read_table()["init"]["eval"].items() if (value := self.take(*keys)[1])},
        }
        if where.get("data_files") and not held_out:
            eval_name, held_out = "eval_data_files", "json"
        strategy = str(self.theirs.get("eval_strategy", self.theirs.get("evaluation_strategy", ""))).lower()
        is_off = strategy in ("no", "false") or (self.trainer == "TRL" and not strategy)
        if (
            held_out is None
            and isinstance(train, str)
            and (where.get("split") or (self.trainer == "TRL" and is_hub_name(train)))
        ):
            eval_name, held_out = name, train  # the other split of the same data
        held = [] if is_off else self._read_datasets(eval_name, held_out, where, is_eval=True)
        held = [one for one in held if not str(one).startswith("FILL IN")]
        sets = [
            [{"split": split, **(one if isinstance(one, dict) else {"path": one})} for one in items]
            for split, items in (("train", found), ("test", held))
        ]
        if self.cut_splits and any(one in sets[0] for one in sets[1]):
            problem = f"data.train and data.eval are the same set: {' and '.join(sorted(self.cut_splits))}"
            fix = "cut the data into two files, or take the eval data out of theirs and write data.eval_fraction"
            raise RecipeError(Fault(self._locate(eval_name), problem, fix))
        if held:
            self.put("data.eval", held[0], eval_name)
            if len(held) > 1:
                self.note(eval_name, "data.eval is one file; the others are not in it")
        elif is_off and eval_keys:
            self.note(eval_name, "nothing is evaluated", is_lost=False)
        name, text_column = self.take("dataset_text_field")
        if name and text_column != "text":
            self.put("data.columns", {text_column: "text"}, name)
        name, columns = self.take("columns")
        with contextlib.suppress(ValueError, RecursionError):
            columns = json.loads(columns) if isinstance(columns, str) else columns
        if isinstance(columns, dict):
            self.put("data.columns", columns, name)
        name, share = self.number("val_size", "val_set_size", "split_dataset_ratio", "test_split_size")
        if share is not None and share < 1 and not held:
            self.put("data.eval_fraction", share, name)
        elif share is not None and share >= 1:
            self.note(name, "data.eval_fraction is a share of the records, below 1")

    def _read_datasets(self, name: str, value: Any, where: Mapping[str, Any], is_eval: bool = False) -> list[Any]:
        """Return the items of data.train, or those that data.eval could be. `where`: path, split, name of all."""
        has_names = self.trainer in ("LLaMA-Factory", "ms-swift")
        if isinstance(value, str) and has_names:
            value = re.split(r"[,\s]+", value.strip())
        found: list[Any] = []
        for item in value if isinstance(value, list) else [value] if value else []:
            block = dict(item) if isinstance(item, dict) else {"path": str(item), **where}
            path = str(block.get("path") or "")
            if self.trainer == "LLaMA-Factory" and not Path(path).suffix and not Path(path).is_file():
                info = self._read_dataset_info(path)
                if info is None:
                    key = ("data", "eval" if is_eval else "train")
                    missing = self.to_fill_in.get(key, "").removesuffix(_NO_INFO)
                    self.to_fill_in[key] = f"{missing or 'the file of'} {one_line(path)}{_NO_INFO}"
                    found.append(f"FILL IN the file of {one_line(path)}")
                    continue
                block |= info
            elif self.trainer == "ms-swift":
                path, _, count = re.sub("^(hf|ms|HF|MS)::", "", path).partition("#")
                path, _, subset = path.partition(":") if "/" in path and not Path(path).exists() else (path, "", "")
                block |= {"path": path, **({"name": subset} if subset else {})}
                if count:
                    self.note(name, f"data.max_samples holds for all files, and there is `#{one_line(count)}`")
            found += self._read_dataset(name, block, is_eval)
        return found

    def _read_dataset(self, name: str, block: dict[str, Any], is_eval: bool) -> list[Any]:
        """Return the items of data.train for a data set of theirs; several where it has several files."""
        path, files = str(block.get("path") or ""), block.get("data_files")
        columns: dict[str, str | None] = {
            str(block[key]): ours
            for key, ours in read_table()["init"]["columns"].items()
            if isinstance(block.get(key), str) and block[key] not in (ours, *_SAME_COLUMNS.get(ours, ()))
        }
        made_format = None
        if self.trainer == "axolotl":
            keys = _read_record_keys(files[0] if isinstance(files, list) and files else files or path)
            made_format = read_prompt_format(block, keys, self._find_bos())
        if made_format is not None:
            columns |= made_format.columns
        if not is_eval:
            self.formats.append((f"{name}.type", made_format or PromptFormat()))
        for other in sorted(
            {
                str(key)
                for key in block
                if block[key] not in (None, "", {}) and (block[key] != [] or key == "roles_to_train")
            }
            - {*read_table()["init"]["columns"], "path", "data_files", "split", "name", "fraction", "columns"}
        ):
            answer = find_answer(("datasets", other))
            is_off = block[other] is False and (answer is None or answer.kind != "by value")
            answer = answer and answer.for_value(block[other])
            why = str(answer or "no trainer has this key")
            is_lost = (answer is None or answer.kind in ("keys", "not supported")) and not is_off
            if other == "type" and made_format is not None:
                continue
            if other == "roles" and isinstance(block[other], dict) and _are_known_roles(block[other]):
                why, is_lost = "the roles are read as these", False
            if other == "tags":
                why, is_lost = _describe_tags(block[other]), True
            if other == "message_property_mappings" and block[other] not in _MESSAGE_KEYS:
                why, is_lost = "a message has role and content, or from and value; rename its keys in the file", True
            self.note(f"{name}.{other}", why, is_lost)
        if files and path in ("", "json", "parquet", "csv", "text"):
            paths = [str(file) for file in (files if isinstance(files, list) else [files])]
        elif files:
            self.note(f"{name}.data_files", "a Hub dataset is read by its split and name")
            paths = [path]
        else:
            paths = [path] if path else []
        made: dict[str, Any] = {"columns": columns} if columns else {}
        if isinstance(media_dir := self.theirs.get("media_dir"), str):
            made["media_dir"] = media_dir
        split = str(block.get("split") or "")
        if not all(Path(one).exists() or Path(one).suffix in _FILE_SUFFIXES for one in paths):
            if re.search(r"[\[+]", split):
                whole = re.split(r"[\[+]", split)[0]
                count = re.fullmatch(r"\w+\[:(\d+)\]", split)
                items = self.theirs.get(name)
                if count and not is_eval and not (isinstance(items, list) and len(items) > 1):
                    self.put("data.max_samples", int(count[1]), f"{name}.split")
                    self.origins["data", "max_samples"] += "; cuts the eval data too"
                else:
                    self.note(f"{name}.split", f"a split is one name, so all of {whole} is used, not {one_line(split)}")
                self.cut_splits.add(split)
                split = whole
            if split and split != ("test" if is_eval else "train"):
                made["split"] = split
            if isinstance(block.get("name"), str):
                made["name"] = block["name"]
        weight = to_number(block.get("fraction"))
        if is_number(weight) and weight > 0 and not is_eval:
            made["weight"] = weight
        return [{"path": one, **made} if made else one for one in paths]

    def _read_dataset_info(self, name: str) -> dict[str, Any] | None:
        """Return the keys of a data set in LLaMA-Factory's dataset_info.json; None where that is not there."""
        file = _find_file(f"{self.theirs.get('dataset_dir', 'data')}/dataset_info.json", self.path)
        if file is None:
            return None
        try:
            info = json.loads(read_limited(file, MAX_RECIPE_BYTES))[name]
            place = info.get("hf_hub_url") or str(file.parent / info["file_name"])
            columns = {f"info_{key}": column for key, column in (info.get("columns") or {}).items()}
            more = {key: info.get(key) for key in ("folder", "num_samples")}
            tags = {key: tag for key, tag in (info.get("tags") or {}).items() if not _is_known_tag(key, tag)}
            return {
                "path": place,
                "name": info.get("subset"),
                "split": info.get("split"),
                **columns,
                **more,
                "tags": tags,
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def _find_bos(self) -> str | None:
        """Return the BOS that the model's tokenizer puts in front of a text, if any; None where it cannot be read here."""
        path = self.values.get(("model", "path"))
        if not isinstance(path, str) or not Path(path).is_dir():
            return None
        try:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path)
            ids = tokenizer("a")["input_ids"]
            return str(tokenizer.bos_token) if ids and ids[0] == tokenizer.bos_token_id else ""
        except Exception:  # of any file that is no tokenizer
            return None

    def _convert_formats(self) -> None:
        """Set the chat template that writes what the data sets' `type` writes there, or say why none does."""
        templates = {form.template for _, form in self.formats}
        for name, form in self.formats:
            if len(templates) > 1 and form.template:
                self.note(
                    name, "prompts of this form need a model.chat_template, and other data sets another; train on one"
                )
            elif form.remark:
                self.note(name, form.remark)
        name, first = self.formats[0] if self.formats else ("", PromptFormat())
        if first.template and len(templates) == 1:
            self.values["model", "chat_template"] = first.template
            self.origins["model", "chat_template"] = name

    def _convert_precision(self) -> None:
        """Set fp32 where both 16-bit types are switched off, and no other key names a type."""
        name = next((one for one in ("bf16", "bfloat16") if self.theirs.get(one) is False), "")
        if name and ("precision",) not in self.values:
            self.put("precision", "fp32", name)
            self.origins["precision",] += ": false, without fp16"
        for other in ("bf16", "bfloat16", "fp16", "float16", "float32", "pure_bf16"):
            self.left.pop(other, None)

    def _note_numbers(self) -> None:
        """Note what gives other numbers than there by design."""
        epochs, warmup, limit = (
            self.origins.get(key) for key in (("epochs",), ("optim", "warmup"), ("data", "max_length"))
        )
        if epochs is not None:
            why = (
                "there the last step of an epoch has the records that are left, and here it goes on with the next "
                "epoch: 3 epochs of 91 records in steps of 8 are 35 steps, not 36"
            )
            self.note(epochs, why)
        if warmup is not None and self.values["optim", "warmup"]:
            self.note(warmup.partition(";")[0], "its first step has a rate of peak / steps of the warmup, and 0 there")
        if limit is not None:
            too_long = read_table()["trainers"][self.trainer]["too_long"]
            self.note(limit, f"a longer record loses older turns, then the end of its answer, and there it {too_long}")
        if self.trainer == "LLaMA-Factory" and self.task in ("sft", "vlm", "dpo", "kto"):
            self.note("template" if "template" in self.theirs else "template (default)", _LINE_BREAK)
        elif self.trainer == "TRL" and self.task in ("dpo", "kto", "rm"):
            self.note("chat_template (default)", _LINE_BREAK)

    def _convert_steps(self) -> None:
        if self.trainer == "ms-swift" and "gradient_accumulation_steps" in self.defaults:
            self.take("gradient_accumulation_steps")
            self.put("batch.total", 16, "gradient_accumulation_steps")
        whole_name, whole = self.number("batch_size") if self.trainer == "axolotl" else ("", None)
        if whole is not None:  # of one process
            micro = to_number(self.theirs.get("micro_batch_size", 1))
            self.take("gradient_accumulation_steps")
            self.put("batch.accumulate", int(whole) // micro if isinstance(micro, int) and micro else 1, whole_name)
        for other in list(self.left):
            answer = find_answer((other,))
            if answer is not None and answer.text == "batch.packing":
                is_packed = other in read_table()["init"]["packing"] and self.theirs[other] is True
                why = (
                    "a sample of their step is a row filled with records, and here it is one record: multiply "
                    "batch.accumulate (or total) by the records that fit into data.max_length, which "
                    "`dstrain data show FILE --recipe THIS` tells"
                )
                self.note(other, why if is_packed else "batch.packing is auto", is_lost=is_packed)
        name, value = self.take("optim", "optimizer", "optim_type")
        value = value.get("type", value.get("name")) if isinstance(value, dict) else value
        if value is not None and (ours := self._choose("optim.name", value, name)) is not None:
            self.put("optim.name", ours, name)
        name, both = self.take("adam_betas")
        if isinstance(both, list):
            self.put("optim.betas", both, name)
        betas = {name: to_number(value) for name, value in (self.take("adam_beta1"), self.take("adam_beta2")) if name}
        if betas:
            self.put("optim.betas", [betas.get("adam_beta1", 0.9), betas.get("adam_beta2", 0.999)], next(iter(betas)))
        steps, count = self.take("warmup_steps", "lr_warmup_steps", "lr_warmup_iters")
        ratio, share = self.take("warmup_ratio", "lr_warmup_ratio", "lr_warmup_fraction", "actor_lr_warmup_ratio")
        if ratio and not to_number(count):
            steps, count, ratio = ratio, share, ""
        if steps:
            self.put("optim.warmup", to_number(count), steps)
        if (steps, self.trainer) == ("warmup_ratio", "axolotl") and steps in self.defaults:
            self.origins["optim", "warmup"] += "; at most 100 steps there"
        if ratio:
            self.note(ratio, f"{steps} counts", is_lost=False)
        schedule, shape = next(
            ((one, self.theirs[one]) for one in find_names("optim.schedule") if one in self.theirs), ("", None)
        )
        if str(shape).lower() == "constant":
            self.values["optim", "warmup"] = 0
            self.origins["optim", "warmup"] = f"{schedule}: constant is without warmup there"
            if steps and steps not in self.defaults:
                self.note(steps, "constant has no warmup there, and constant_with_warmup has one", is_lost=False)
        steps, count = self.number(*find_names("steps"))
        epochs, passes = self.take(*find_names("epochs"), "epochs")
        if count is not None:
            self.put("steps", count, steps)
            self.note(epochs, f"{steps} counts", is_lost=False) if epochs else None
        elif epochs:
            self.put("epochs", to_number(passes), epochs)
        for other, group in (("vit_lr", "vision"), ("aligner_lr", "projector"), ("embedding_lr", "*.embed_tokens")):
            name, rate = self.number(other)
            if rate is not None:
                self.put(("optim", "groups", group, "lr"), rate, name)

    def _convert_intervals(self) -> None:
        for block, (strategies, steps, per_epoch) in read_table()["init"]["intervals"].items():
            kind, strategy = self.take(*strategies)
            name, every = self.number(*steps)
            often, times = self.number(per_epoch)
            if strategy == "epoch":
                self.put(f"{block}.every", "epoch", kind)
            elif times is not None:
                self.put(f"{block}.every", "epoch", often)
                if times != 1:
                    why = f"{block}.every is epoch or a number of steps; there it is {times} times per epoch"
                    self.note(often, why, is_lost=False)
            elif strategy == "steps" and every is None:  # evaluates as often as it logs
                logged = self.theirs.get("save_steps" if self.trainer == "ms-swift" else "logging_steps", 500)
                every = to_number(logged) if block == "eval" else 500
                self.put(f"{block}.every", max(int(every), 1) if is_number(every) else 500, kind)
            elif every is not None and every >= 1:
                self.put(f"{block}.every", int(every), name)
            elif every is not None:
                self.note(name, f"{block}.every is a number of steps, not a share of them")
            if str(strategy).lower() in ("no", "best", "false"):
                why = "the last checkpoint and the best are kept" if block == "save" else "nothing is evaluated"
                self.note(kind, why, is_lost=False)
        name, _ = self.take("do_eval")
        if name:
            self.note(name, "held-out data is evaluated, where there is some", is_lost=False)
        name, metric = self.take("metric_for_best_model", "eval_metric")
        if (metric := str(metric or "").removeprefix("eval_")) in ("loss", *find_task(str(self.task)).metric_names):
            self.put("eval.metric", metric, name)
        elif metric:
            self.note(name, f"task {self.task} has no metric {one_line(metric)}")
        name, keep = self.take("save_total_limit")
        if is_number(keep := to_number(keep)):
            self.put("save.keep", keep if keep > 0 else None, name)
        name, seconds = self.number("ddp_timeout")
        if seconds is not None and seconds / 60 <= 1e6:
            self.put("timeout_minutes", max(seconds / 60, 0.1), name)
        elif name:
            self.note(name, "it is no limit there; timeout_minutes is 10", is_lost=False)
        name, logged = self.number("logging_steps")
        if logged is not None and logged >= 1:
            self.put("log.every", int(logged), name)
        elif logged is not None:
            self.note(name, "log.every is a number of steps, not a share of them")

    def _convert_trackers(self) -> None:
        name, trackers = self.take("report_to", "log_type")
        names = re.findall(r"\w+", str(trackers or "").lower())
        project_name, project = self.take(*find_names("log.wandb.project"))
        run_name, run = self.take(*find_names("log.wandb.name"))
        switch, is_switched = self.take("use_wandb")
        mode_name, mode = self.take("wandb_mode")
        is_on = {"wandb", "all"} & {*names} or (self.trainer == "axolotl" and project) or is_switched is True
        if is_on and is_switched is not False and mode != "disabled":
            # huggingface: the project of transformers where none is named
            self.put("log.wandb.project", str(project or "huggingface"), project_name or name or switch)
            if run:
                self.put("log.wandb.name", str(run), run_name)
            if mode in ("online", "offline"):
                self.put("log.wandb.mode", mode, mode_name)
        for key, is_set in (
            (name, "tensorboard" in names),
            ("use_tensorboard", self.take("use_tensorboard")[1] is True),
        ):
            if is_set:
                self.put("log.tensorboard", True, key)
        if "mlflow" in names or self.take("use_mlflow")[1] is True:
            self.put("log.sinks", ["dstrain.report.sinks.MLflowSink"], name or "use_mlflow")
        if others := {*names} - {"none", "all", "wandb", "tensorboard", "mlflow", "true", "false"}:
            self.note(name, f"log.sinks takes a class of yours for {', '.join(sorted(others))}")

    def _convert_ds_config(self) -> None:
        name, value = self.take("deepspeed", "ds_cfgs")
        launch, block = self.take("accelerate_config")
        if isinstance(block, str) and (file := _find_file(block, self.path)):
            block = read_yaml(file).values
        if isinstance(block, dict):
            given = block.get("deepspeed_config")
            if not name and isinstance(given, dict):
                stage, value = given.get("zero_stage"), given.get("deepspeed_config_file")
                devices = [given.get(f"offload_{part}_device", "none") for part in ("optimizer", "param")]
                name, value = launch, value or (None if stage is None else (stage, devices))
            name = name or launch
            if ("precision",) not in self.values and (width := find_value("precision", block.get("mixed_precision"))):
                self.put("precision", width, launch)
        elif launch and not name:
            name, value = launch, block
        if value is None:
            return self.note(name, "ds_config is zero2", is_lost=False) if name else None
        if isinstance(value, dict):
            return self.note(name, "write the block as a JSON file, and `dstrain presets --adopt` converts it")
        if isinstance(value, tuple):
            stage, devices = str(value[0]), value[1]
        elif file := _find_file(str(value), self.path):
            try:
                block = read_json(file).values
                stage = f"{get_zero_stage(block)}"
            except PresetError as error:
                raise UsageError(f"{self._locate(name)}: {error}") from None
            devices = [get_offload_device(block, part) or "none" for part in ("offload_optimizer", "offload_param")]
        else:
            stage = "".join(re.findall(r"z(?:ero)?[_-]?([0-3])", str(value))[-1:])
            devices = ["cpu" if "offload" in str(value) else "none"] * 2
        adopt = f"; `dstrain presets --adopt {one_line(str(value))}` keeps the file's other settings"
        adopt = adopt if str(value).endswith(".json") else ""
        if not stage:
            return self.note(name, f"its ZeRO stage is not known here, and zero2 is used{adopt}", bool(adopt))
        offload = "_offload" if stage > "1" and "cpu" in devices else ""
        self.put("ds_config", f"zero{stage}{offload}", name)
        self.origins["ds_config",] += adopt
        if {*devices[: 1 + (stage == "3")]} != {"cpu" if offload else "none"}:
            self.note(f"{name} (offload)", f"it differs from the preset zero{stage}{offload}{adopt}")

    def _choose(self, key: str, value: Any, name: str) -> Any:
        """Return the value here for a value of theirs; None, with a note, where there is none."""
        if key == "model.attn_implementation" and "/" in str(value):
            return value
        if (ours := find_value(key, value)) is None:
            is_lost = key != "model.attn_implementation"
            self.note(name, f"{key} has no `{one_line(str(value))[:60]}`", is_lost)
        return ours

    def _convert_other(self, name: str) -> None:
        """Convert a key that stands alone, or list it."""
        value = self.theirs.get(name, self.defaults.get(name))
        answer = find_answer((name,)) or find_answer(self.places.get(name, (name,)))
        if answer is None and name in _TOP_KEYS and not isinstance(value, (dict, list)):
            return self.put(name, to_number(value), name)
        if answer is None:
            near = suggest_name(name, [*read_aliases()])
            return self.note(name, "no trainer has this key" + (f"; {near}" if near.startswith("did you mean") else ""))
        is_set = answer.kind == "by value" or str(value).lower() not in ("false", "0", "none")
        answer = answer.for_value(value)
        if answer.kind != "keys":
            return self.note(name, str(answer), is_lost=answer.kind == "not supported" and is_set)
        key, _, given = answer.text.partition(": ")
        if key.startswith("options."):
            return self._convert_option(name, value, key.removeprefix("options."))
        if _PLAIN_KEY.fullmatch(key) and re.fullmatch(r"[\w-]+|\[.*\]", given) and isinstance(value, bool):
            return self.put(key, yaml.safe_load(given), name) if value else None
        if key in read_values() and not given:
            ours = self._choose(key, value, name)
            return None if ours is None else self.put(key, ours, name)
        if _PLAIN_KEY.fullmatch(key) and not given and key not in _AS_NOTES and not isinstance(value, (dict, list)):
            return self.put(key, value if key.startswith(_TEXT_KEYS) else to_number(value), name)
        self.note(name, str(answer), is_lost=key.startswith(_LEARNT_KEYS) and value not in (False, 0))

    def _convert_option(self, name: str, value: Any, option: str) -> None:
        known = {one.name for one in task_options(find_task(str(self.task)))}
        value = value[0] if isinstance(value, list) and len(value) == 1 else to_number(value)
        is_set = value not in (False, 0, None)
        if name in ("train_on_prompt", "train_on_inputs"):
            value = not value
        if option == "simpo_gamma" and self._loss() != "simpo":
            self.note(name, "only simpo has it", is_lost=False)
        elif option == "loss_type" and self.loss_type is not None:
            self.note(name, f"the method is {self.loss_type}", is_lost=False)
        elif option not in known:
            self.note(name, f"task {self.task} has no option {option}", is_lost=is_set)
        else:
            self.put(("options", option), value, name)
            if name == "assistant_only_loss" and name in self.defaults:
                why = (
                    "of records with prompt and completion only the completion is learnt there, with the line break "
                    "after its end; write true for them"
                )
                self.note(f"{name} (default)", why)

    def _loss(self) -> str | None:
        """Return the loss of task dpo that is asked for."""
        given = next((self.theirs[one] for one in find_names("options.loss_type") if one in self.theirs), None)
        return self.loss_type or (given[0] if isinstance(given, list) else given)

    # The recipe

    def _finish(self) -> ConvertedRecipe:
        locations = {
            path: f"{self._locate(origin.removesuffix(' (default)'))} ->" for path, origin in self.origins.items()
        }
        config = check_values(SourceMap(self.source.name, _nest(self.values), locations))
        try:
            make_task(config)
        except TaskError as error:
            key = tuple((re.findall(r"options\.\w+", str(error)) or ["task"])[0].split("."))
            raise UsageError(f"{locations.get(key, self.source.name)} {error}") from None
        empty: dict[KeyPath, Any] = {path: [] if path == ("data", "train") else None for path in self.to_fill_in}
        lines = [
            f"# From a configuration of {self.trainer}, by `dstrain init --from {one_line(self.path.name)}`.",
            "# A comment names the key there; (default): the file leaves it out, and this is what it takes then.",
            "# Every key: `dstrain train THIS --dry-run`.",
            *self._render(_nest(empty | self.values), ()),
        ]
        named = {
            *" ".join(self.origins.values()).replace(",", " ").replace(";", " ").split(),
            *itertools.chain(*self.notes.values()),
        }
        for name in self.unset:
            self.note(name, "its value means that it is not set", is_lost=False)
        for name in [name for name in self.theirs if name not in named]:
            self.note(name, "it goes with a key above, or asks for what is done anyway", is_lost=False)
        if self.notes:
            lines += ["", f"# Keys of {one_line(self.path.name)} that are not above:"]
            lines += [f"#   {one_line(', '.join(names))}: {one_line(why)}" for why, names in self.notes.items()]
        lost = {why: [name for name in names if name in self.lost] for why, names in self.notes.items()}
        told = [one_line(f"{first_names(names)}: {why}") for why, names in lost.items() if names]
        return ConvertedRecipe("\n".join(lines) + "\n", self.trainer, [*map(dotted_name, self.to_fill_in)], told)

    def _render(self, block: Mapping[str, Any], path: KeyPath) -> Iterator[str]:
        """Yield the lines of a block, each with its origin."""
        indent = "  " * len(path)
        for name, value in block.items():
            here = (*path, name)
            is_block = isinstance(value, dict) and value
            text = f"{indent}{to_yaml(name)}:" + ("" if is_block else f" {to_yaml(value)}")
            todo = self.to_fill_in.get(here)
            comment = f"FILL IN: {todo}" if todo else self.origins.get(here, "")
            yield f"{text:<36} # {one_line(comment)}" if comment else text
            if is_block:
                yield from self._render(value, here)


def _nest(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return the values as blocks, in the order of the schema."""
    order: dict[KeyPath, int] = {tuple(key.split(".")): place for place, key in enumerate(list_keys())}
    nested: dict[str, Any] = {}
    for path in sorted(values, key=lambda path: (order.get(path[:2], order[path[:1]]), len(path))):
        block = nested
        for part in path[:-1]:
            block = block.setdefault(str(part), {})
        block[str(path[-1])] = dict(values[path]) if isinstance(values[path], dict) else values[path]
    return nested


def _find_file(name: str, other: Path) -> Path | None:
    """Return the file of that name here, or in the folder of another file or one above it."""
    here = Path.cwd()
    folders = (
        folder.relative_to(here) if folder.is_relative_to(here) else folder for folder in other.resolve().parents
    )
    return next((one for one in (Path(name), *(folder / name for folder in folders)) if one.is_file()), None)


def is_unset(name: str, value: Any) -> bool:
    """Return whether a value of theirs means that the key is not set, such as -1 for the number of steps."""
    text, table = str(value).lower(), read_table()["init"]
    if text in ("none", "null") and name not in table["none is a value"]:
        return True
    answer = find_answer((name,))
    key = answer.text if answer is not None and answer.kind == "keys" else ""
    if text in ("false", "no") and is_number_key(key):
        return True
    values, number = table["unset"].get(key, ()), to_number(value)
    if is_number(number):
        return number in [known for known in values if not isinstance(known, bool)]
    return text in [str(known).lower() for known in values]


def _read_record_keys(file: Any) -> set[str] | None:
    """Return the keys of the first record of a file; None where there is no such file."""
    if not isinstance(file, str) or not Path(file).is_file():
        return None
    try:
        return {*open_source(file, {})[0]}
    except (UsageError, IndexError, OSError):
        return None


def _are_known_roles(roles: Mapping[str, Any]) -> bool:
    """Return whether the roles of a data set, role -> its names there, are read so here."""
    return all(
        ROLE_ALIASES.get(str(name).lower()) == ROLE_ALIASES.get(str(role).lower())
        for role, names in roles.items()
        for name in (names if isinstance(names, list) else [names])
    )


def _is_known_tag(key: str, tag: Any) -> bool:
    """Return whether messages with this tag of dataset_info.json are read here as there."""
    expected = _INFO_TAGS.get(key)
    return tag in expected if isinstance(expected, tuple) else ROLE_ALIASES.get(str(tag).lower()) == expected


def _describe_tags(tags: Mapping[str, Any]) -> str:
    """Return what is to be done with messages that have other tags."""
    given = ", ".join(f"{key} {one_line(str(tag))}" for key, tag in tags.items())
    return (
        f"a message has role and content, or from and value, with the roles of docs/data.md; rename {given} in the file"
    )


def to_number(value: Any) -> Any:
    """Return the number that a text is (YAML 1.1 reads 1e-4 as text), else the value itself."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        number = float(value)
        return int(number) if number.is_integer() and not re.search("[.eE]", value) else number
    return value
