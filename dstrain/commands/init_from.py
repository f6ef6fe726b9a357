"""dstrain init --from: a recipe from the configuration of TRL, LLaMA-Factory, axolotl, ms-swift or align-anything."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dstrain.commands.init import to_yaml
from dstrain.commands.init_prompts import PromptFormat, read_prompt_format
from dstrain.commands.init_rows import Conversion, positive_number, read_rows, to_number
from dstrain.commands.init_scripts import SHELL_VALUE, find_file, read_command
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
from dstrain.config.read import MAX_RECIPE_BYTES, check_values, is_number_key, list_keys, read_yaml
from dstrain.config.schema import RunConfig
from dstrain.data.formats.messages import ROLE_ALIASES
from dstrain.data.sources.hub import is_hub_name
from dstrain.data.sources.open import open_source
from dstrain.errors import (
    Fault,
    KeyPath,
    PresetError,
    RecipeError,
    SourceMap,
    TaskError,
    UsageError,
    dotted_name,
    first_names,
    lookup,
    one_line,
    suggest_name,
)
from dstrain.files import parse_json, read_limited
from dstrain.preset.check import get_offload_device, get_zero_stage, read_json
from dstrain.report.run_history import is_number
from dstrain.tasks import find_task, make_task, task_options

_TASK_FLAGS = {"reward_model": "rm", "process_reward_model": "prm"}
_SAME_COLUMNS = {"messages": ("conversations", "conversation"), "conversations": ("messages", "conversation")}
"""Name in a record -> columns that are read alike."""
_MESSAGE_KEYS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
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
_PLAIN_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_INFO_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool", "function_tag": "assistant",
}  # fmt: skip
"""Tag of LLaMA-Factory's dataset_info.json -> the names that are read here, or the role that its value is here."""


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
        source, trainer = read_yaml(path, "1.1"), None
    return _Converter(path, source, task, trainer or _check_trainer(path, source)).convert()


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
class _Converter(Conversion):
    """Their file on its way to a recipe."""

    loss_type: str | None = None
    cut_splits: set[str] = field(default_factory=set)
    """Their splits that are a part of one."""
    unset: list[str] = field(default_factory=list)
    """Their keys whose value means that they are not set."""
    formats: list[tuple[str, PromptFormat]] = field(default_factory=list)
    """Key and format of each of their data sets."""

    def convert(self) -> ConvertedRecipe:
        """Return the recipe. Raises UsageError."""
        rows = read_rows()
        self._read_keys()
        self.task = self._find_task()
        self._find_defaults()
        self.apply(rows["adapters"] + rows["model"])
        self._convert_data_sets()
        self.apply(rows["data"] + rows["steps"] + rows["intervals"] + rows["trackers"])
        self._convert_ds_config()
        self.apply(rows["precision"])
        for name in list(self.left):
            self._convert_by_answer(name)
        self.apply(rows["numbers"])
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
                problem = f"is set again with another value, after {self.locate(name)}"
                raise RecipeError(Fault(self.source.get_location(key), problem, "keep one of them"))
            self.places[name], self.theirs[name] = key, value
        self.left = dict.fromkeys(self.theirs)
        for name in [one for one, value in self.theirs.items() if value is SHELL_VALUE]:
            self.note(name, "its value is the shell's; write it in")

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
        if self.loss_type == "simpo":
            margin = positive_number(self.take("gamma")[1])
            if margin is not None:
                self.put("options.simpo_gamma", margin, "gamma")
        return task

    def _find_defaults(self) -> None:
        known = read_table()["trainers"][self.trainer]
        defaults = dict(known["defaults"])
        for name, rate in known.get("learning_rates", {}).items():  # of a task, or a method
            if name == self.task or name in map(self.theirs.get, find_names("model.lora")):
                defaults["learning_rate"] = rate
        answers = map(find_answer, ((name,) for name in self.theirs))
        set_keys = {answer.text for answer in answers if answer is not None}
        has_length = bool({"steps", "epochs"} & set_keys) or "epochs" in self.theirs
        for name, value in defaults.items():
            answer = find_answer((name,))
            key = None if answer is None else answer.text
            is_set = name in self.theirs or key in set_keys - {"optim.betas"}
            if key == "batch.accumulate":
                is_set = is_set or "batch.total" in set_keys
            if key == "epochs":
                is_set = is_set or has_length
            if not is_set:
                self.defaults[name] = value
        self.left |= dict.fromkeys(self.defaults)

    def _convert_data_sets(self) -> None:
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
        where = {"name": where["name"]}
        for key, keys in read_table()["init"]["eval"].items():
            _, value = self.take(*keys)
            if value:
                where[key] = value
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
            raise RecipeError(Fault(self.locate(eval_name), problem, fix))
        if held:
            self.put("data.eval", held[0], eval_name)
            if len(held) > 1:
                self.note(eval_name, "data.eval is one file; the others are not in it")
        elif is_off and eval_keys:
            self.note(eval_name, "nothing is evaluated", is_lost=False)

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
        media_dir = self.theirs.get("media_dir")
        if isinstance(media_dir, str):
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
        file = find_file(f"{self.theirs.get('dataset_dir', 'data')}/dataset_info.json", self.path)
        if file is None:
            return None
        try:
            info = parse_json(read_limited(file, MAX_RECIPE_BYTES))[name]
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
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
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

    def _convert_ds_config(self) -> None:
        name, value = self.take("deepspeed", "ds_cfgs")
        launch, block = self.take("accelerate_config")
        if isinstance(block, str):
            config_file = find_file(block, self.path)
            if config_file:
                block = read_yaml(config_file, "1.1").values
        if isinstance(block, dict):
            given = block.get("deepspeed_config")
            if not name and isinstance(given, dict):
                stage, value = given.get("zero_stage"), given.get("deepspeed_config_file")
                devices = [given.get(f"offload_{part}_device", "none") for part in ("optimizer", "param")]
                name, value = launch, value or (None if stage is None else (stage, devices))
            name = name or launch
            precision = find_value("precision", block.get("mixed_precision"))
            if precision and ("precision",) not in self.values:
                self.put("precision", precision, launch)
        elif launch and not name:
            name, value = launch, block
        if value is None:
            return self.note(name, "ds_config is zero2", is_lost=False) if name else None
        if isinstance(value, dict):
            return self.note(name, "write the block as a JSON file, and `dstrain presets --adopt` converts it")
        ds_file = find_file(str(value), self.path)
        if isinstance(value, tuple):
            stage, devices = str(value[0]), value[1]
        elif ds_file:
            try:
                block = read_json(ds_file).values
                stage = f"{get_zero_stage(block)}"
            except PresetError as error:
                raise UsageError(f"{self.locate(name)}: {error}") from None
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

    def _convert_by_answer(self, name: str) -> None:
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
            ours = self.choose(key, value, name)
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
            path: f"{self.locate(origin.removesuffix(' (default)'))} ->" for path, origin in self.origins.items()
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
