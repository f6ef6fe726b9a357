"""The model card of an export, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.commands.trained_model import LoadedModel
from dstrain.config.read import dump_yaml
from dstrain.config.schema import DatasetConfig, RunConfig
from dstrain.data.encoding.chat_template import has_chat_template
from dstrain.data.sources.hub import is_hub_name
from dstrain.errors import RunError, UsageError, mask_secrets, one_line
from dstrain.models.folder import is_local_path, resolve_base_model
from dstrain.models.load import HUB_TIMEOUT_SECONDS
from dstrain.models.params import unwrap_peft
from dstrain.process_setup import log_if_slow
from dstrain.report.run_history import is_number
from dstrain.report.run_log import find_last_row, task_metric_names
from dstrain.tasks import Task, builtin_tasks
from dstrain.training.generation_config import collect_stop_ids
from dstrain.training.start import read_recorded_recipe
from dstrain.training.state.manifest import inspect_checkpoint

CARD_FILE = "README.md"
MAX_CARD_BYTES = 1 << 20
"""Largest model card of a base model that is read."""
LICENSE_KEYS = ("license", "license_name", "license_link")
PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoRewardModel": "text-classification",
}
"""Auto class -> task of the Hub (huggingface.js, packages/tasks/src/pipelines.ts)."""
LIBRARY_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")
"""Files from which a library finds a model: those of an earlier upload that an export does not have are removed."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Where an export is published, and under which license."""

    repo_id: str | None = None
    """OWNER/NAME on the Hub; None: it is not uploaded."""
    private: bool = False
    """Create a private repository."""
    license: str | None = None
    """Identifier for the model card, such as apache-2.0; None: that of the base model, if its model card can be read."""
    dry_run: bool = False
    """List the files, and leave nothing."""

    def check(self) -> None:
        """Raise UsageError for what can be found wrong without a network, before anything is written."""
        if self.license is not None and not re.fullmatch(r"[\w.+-]+", self.license, re.ASCII):
            fix = "write an identifier such as apache-2.0, or other (huggingface.co/docs/hub/repositories-licenses)"
            raise UsageError(f"--license {self.license}: is not an identifier; {fix}")
        if self.repo_id is None:
            if self.private:
                raise UsageError("--private: needs a repository; add --push-to-hub OWNER/NAME")
            return
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        option = f"--push-to-hub {self.repo_id}"
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise UsageError(f"{option}: {one_line(str(error)).rstrip('.')}; write OWNER/NAME") from None
        if "/" not in self.repo_id:
            raise UsageError(f"{option}: names no owner; write OWNER/NAME")
        if self.dry_run:
            return
        if constants.HF_HUB_OFFLINE:
            raise UsageError(f"{option}: HF_HUB_OFFLINE forbids it; unset it, or leave the option out")
        if get_token() is None:
            raise UsageError(f"{option}: there is no token; set HF_TOKEN, or run `hf auth login`")


def push_to_hub(folder: Path, target: Publication) -> str:
    """Upload an exported folder; return the address of its repository.

    The repository is created where it does not exist. Raises RunError; the folder stays as it is.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session

    repo_id = target.repo_id
    assert repo_id is not None
    api = HfApi(library_name="dstrain")
    try:
        # huggingface_hub's other requests have no time limit.
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
        api.create_repo(repo_id, private=target.private or None, exist_ok=True)
        if target.private and not api.model_info(repo_id).private:
            raise ValueError("it exists and is public, and --private cannot change that; make it private there first")
        with log_if_slow(f"uploading {folder} to {repo_id}"):
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Upload the export of dstrain",
                delete_patterns=[*LIBRARY_FILES],
            )
    except Exception as error:  # huggingface_hub's own errors, those of its HTTP library and of hf_xet
        words = ["hf", "upload", *(["--private"] if target.private else []), repo_id, str(folder)]
        fix = f"`{shlex.join(words)}` sends it, without a new export"
        problem = f"--push-to-hub {repo_id}: {_describe_hub_error(error, repo_id)}"
        raise RunError(f"{problem}; the export in {folder} is complete: {fix}") from error
    return f"{constants.ENDPOINT}/{repo_id}"


def _describe_hub_error(error: Exception, repo_id: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    text = one_line(" ".join(str(error).split()))[:300] or type(error).__name__
    if status == 401:
        return f"the Hub refuses the token ({text})"
    if status == 403:
        return f"the token may not write to {repo_id.partition('/')[0]} ({text})"
    return f"the upload failed ({text})"


def list_files(folder: Path) -> dict[str, int]:
    """Return the files of a folder by their relative paths, with their sizes in bytes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def make_card(loaded: LoadedModel, run_dir: Path, is_merged: bool, name: str, target: Publication) -> str:
    """Return the model card of an export, with the metadata of the Hub.

    `name`: of the model. Texts of the run are escaped; paths are shown by their last part.
    """
    from huggingface_hub import ModelCard, ModelCardData

    task = loaded.task
    checkpoint = None if loaded.checkpoint is None else inspect_checkpoint(loaded.checkpoint)
    info = {} if checkpoint is None else checkpoint.run_info
    recipe = task.recipe if checkpoint is None else read_recorded_recipe(checkpoint)
    auto_class = _find_auto_class(task)
    base = resolve_base_model(recipe.model).path
    is_on_hub = base is not None and not is_local_path(base) and not Path(base).is_dir()
    row = _find_eval_row(run_dir, loaded.step)
    license_values = {"license": target.license} if target.license else _read_license(recipe)
    known_task = recipe.task if recipe.task in builtin_tasks() else "custom"
    is_adapter = recipe.model.lora is not None and not is_merged
    library = "peft" if is_adapter else "transformers" if auto_class else "dstrain"
    results = _make_eval_results(row, recipe, auto_class) or None
    data = ModelCardData(
        **license_values,
        base_model=base if is_on_hub else None,
        datasets=[item.path for item in recipe.data.train if not _is_local(item.path)] or None,
        library_name=library,
        pipeline_tag=PIPELINE_TAGS.get(auto_class),
        tags=["dstrain", known_task],
        model_name=one_line(name) if results else None,
        eval_results=results,
    )
    own_keys = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"launch", "log", "save", "profile"})
    place = target.repo_id or "FOLDER"
    quantization = _quantization_arguments(loaded) if is_adapter else None
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=_escape(name),
        training=_list_facts(_describe_training(recipe, info, base, is_merged)),
        use=_describe_use(place, auto_class, base if is_adapter else None, known_task == "custom", quantization),
        generation=_describe_generation(loaded, place, is_adapter),
        recipe=_fence(dump_yaml(_without_paths(own_keys)), "yaml"),
    )
    return mask_secrets(str(card))


_TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

Trained with dstrain.

{{ training }}

## Use

{{ use }}
{% if generation %}
## Generation

{{ generation }}
{% endif %}
## Recipe

Keys that differ from the defaults; paths by their last part. `dstrain_recipe.yaml` has every key.

{{ recipe }}
"""
"""The card's form, for `ModelCard.from_template`. All texts of the run are escaped before; metrics and license are in the
metadata."""


def write_card(folder: Path, card: str) -> None:
    """Write the model card; it takes the place of one that a library has written."""
    (folder / CARD_FILE).write_bytes(card.encode(errors="backslashreplace"))  # file names need not be UTF-8


def _find_auto_class(task: Task) -> str:
    """Return the name of the class that loads the exported model; empty for a model that is the task's own."""
    source = task.model_source
    if source is None or task.loads_own_model:
        return ""
    return str(getattr(source.auto_class, "__name__", type(source.auto_class).__name__))


def _is_local(name: str) -> bool:
    return is_local_path(name) or not is_hub_name(name) or Path(name).expanduser().exists()


def _find_eval_row(run_dir: Path, step: int | None) -> dict[str, Any]:
    """Return the last evaluation at this step; empty where there is none."""
    file = run_dir / "metrics.jsonl"
    if step is None or not file.is_file():  # a FIFO in a folder of somebody else would block
        return {}
    return find_last_row(file, lambda row: (row.get("split"), row.get("step")) == ("eval", step)).row or {}


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss and the task's metrics of a row that are finite numbers."""
    return {name: row[name] for name in ("loss", *task_metric_names(row)) if is_number(row.get(name))}


def _eval_source(recipe: RunConfig) -> DatasetConfig | None:
    """Return the held-out data: that of data.eval, or the training data of which a fraction was held out."""
    return recipe.data.eval or next(iter(recipe.data.train), None)


def _make_eval_results(row: Mapping[str, Any], recipe: RunConfig, auto_class: str) -> list[Any]:
    from huggingface_hub import EvalResult

    source = _eval_source(recipe)
    if source is None:
        return []
    label = one_line(_name(source.path))
    # The Hub refuses a card whose type is no `[\w-]+/[\w-.]+`, the form of a dataset's id.
    dataset_type = label if not _is_local(source.path) else re.sub(r"[^\w.-]+", "_", label, flags=re.ASCII)
    return [
        EvalResult(
            task_type=PIPELINE_TAGS.get(auto_class, "other"),
            dataset_type=dataset_type,
            dataset_name=label,
            dataset_config=source.name,
            dataset_split=source.split,
            metric_type=one_line(name),
            metric_value=value,
        )
        for name, value in _metrics(row).items()
    ]


def _describe_training(recipe: RunConfig, info: Mapping[str, Any], base: str | None, is_merged: bool) -> dict[str, Any]:
    """Return the facts of the training: name -> value, None where there is none."""
    model, lora = recipe.model, recipe.model.lora
    trained = "all weights" if lora is None else f"LoRA adapters (rank {lora.rank}, alpha {lora.alpha:g})"
    trained += ", merged into the base model" if is_merged else ""
    data = _as_mapping(_as_mapping(info.get("inputs")).get("data.train"))
    return {
        "task": _name(recipe.task),
        "base model": _name(base) if base else "none: trained from scratch",
        "base revision": model.revision,
        "base in training": f"quantized, {model.quantize}" if model.quantize else None,
        "trained": trained + (f", without {', '.join(model.freeze)}" if model.freeze else ""),
        "data": ", ".join(_describe_source(source) for source in recipe.data.train),
        "samples in the data": data.get("samples"),
        "checkpoint": f"step {info['step']} of {info.get('steps', '?')}" if "step" in info else None,
    }


def _quantization_arguments(loaded: LoadedModel) -> str | None:
    """Return the arguments of transformers' BitsAndBytesConfig that give the base the weights that adapters were trained on.

    None: the base was not quantized.
    """
    kind = loaded.task.recipe.model.quantize
    if kind == "int8":
        return "load_in_8bit=True"
    if kind != "nf4":
        return None
    dtype = str(unwrap_peft(loaded.model).dtype).removeprefix("torch.")
    settings = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": dtype}
    return ", ".join(["load_in_4bit=True", *(f"bnb_4bit_{name}={value!r}" for name, value in settings.items())])


def _describe_use(
    place: str, auto_class: str, adapter_base: str | None, is_own_task: bool, quantization: str | None
) -> str:
    """Return the lines that load the model; `adapter_base`: the base model of adapters. `quantization`: of the base."""
    named = repr(place)
    is_generative = auto_class in ("AutoModelForCausalLM", "AutoModelForImageTextToText")
    part = "processor" if auto_class == "AutoModelForImageTextToText" else "tokenizer"
    reader = f"Auto{part.capitalize()}"
    last = f"{part} = {reader}.from_pretrained({named})"
    if auto_class == "AutoRewardModel" and adapter_base is None:
        lines = ["import dstrain", "", f"model = dstrain.load_reward_model({named})"]
    elif not auto_class or (adapter_base is not None and not is_generative) or (quantization and part == "processor"):
        # transformers would quantize a vision tower too.
        options = ', task="TASK_FILE.py"' if is_own_task else ""
        lines = ["import dstrain", "", f"model = dstrain.load({named}{options}).model"]
    elif adapter_base is not None:
        base = repr(one_line(_name(adapter_base)))
        lines = ["from peft import PeftModel", f"from transformers import {auto_class}, {reader}", ""]
        if quantization:
            lines[1] += ", BitsAndBytesConfig"
            lines += [
                "# The adapters were trained on the quantized base.",
                f"quantized = BitsAndBytesConfig({quantization})",
            ]
            base += ", quantization_config=quantized"
        lines += [
            f"base = {auto_class}.from_pretrained({base})",
            f"model = PeftModel.from_pretrained(base, {named})",
            last,
        ]
    else:
        first = f"from transformers import {auto_class}, {reader}"
        lines = [first, "", f"model = {auto_class}.from_pretrained({named})", last]
    return _fence("\n".join(lines), "python")


def _describe_generation(loaded: LoadedModel, place: str, is_adapter: bool) -> str:
    """Return what a program needs to know to answer as `dstrain generate` does; empty for a model that scores."""
    task, model = loaded.task, unwrap_peft(loaded.model)
    source = task.model_source
    if source is None or not source.can_generate or not hasattr(model, "generation_config"):
        return ""
    tokenizer = source.tokenizer
    stops = sorted(collect_stop_ids(model.generation_config, tokenizer))
    facts = {
        "an answer ends at": ", ".join(f"{token} ({tokenizer.decode([token])})" for token in stops) or "no token",
        "pad token": f"{tokenizer.pad_token_id} ({tokenizer.pad_token}), on the left",
        "prompts": _describe_prompts(tokenizer, task.recipe.model.chat_template_kwargs),
    }
    if source.vision_processor is not None:
        limit = getattr(task.recipe.model.processor, "max_pixels", None)
        facts["images"] = "the processor in the folder" + (f", at most {limit} pixels" if limit else "")
    if not is_adapter:
        return _list_facts(facts)
    code = (
        "from transformers import GenerationConfig\n\n"
        f"model.generation_config = GenerationConfig.from_pretrained({place!r})"
    )
    why = "peft takes the generation config of the base model; this sets the adapters':"
    return f"{_list_facts(facts)}\n\n{why}\n\n{_fence(code, 'python')}"


def _describe_prompts(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    if not has_chat_template(tokenizer):
        return "no chat template: user and assistant turns begin with Human: and Assistant:, after an empty line"
    fixed = ", ".join(f"{name}={value!r}" for name, value in sorted(kwargs.items()))
    return "the chat template in the folder" + (f", with {fixed} unless you set them" if fixed else "")


def _describe_source(source: DatasetConfig) -> str:
    more = [part for part in (source.name, source.split) if part]
    weight = getattr(source, "weight", 1.0)
    return _name(source.path) + "".join(f":{part}" for part in more) + (f" x {weight:g}" if weight != 1.0 else "")


def _read_license(recipe: RunConfig) -> dict[str, str]:
    """Return the license in the model card of the base model, where this machine has it; else nothing."""
    from huggingface_hub import metadata_load, try_to_load_from_cache

    base = resolve_base_model(recipe.model)
    if base.path is None:
        return {}
    folder = Path(base.path).expanduser()
    try:
        is_folder = folder.is_dir()
        card = folder / CARD_FILE if is_folder else try_to_load_from_cache(base.path, CARD_FILE, revision=base.revision)
        file = Path(card) if isinstance(card, str | Path) else None
        if file is None or not file.is_file() or file.stat().st_size > MAX_CARD_BYTES:
            return {}
        values = metadata_load(file) or {}
    except Exception:  # no Hub id, or a card with any content
        return {}
    found = {key: values[key] for key in LICENSE_KEYS if isinstance(values.get(key), str) and values[key].isprintable()}
    return found if "license" in found else {}


_PATH_IN_TEXT = re.compile(r"(?<![\w/:.~<])(?:~|\.{1,2})?(?:/[^\s/'\"<>]+){2,}/?")


def _without_paths(value: Any) -> Any:
    """Return values of a recipe with each local path and URL replaced by its last part."""
    if isinstance(value, Mapping):
        return {str(key): _without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if "\n" not in value and (is_local_path(value) or "://" in value):
        return _name(value)
    return _PATH_IN_TEXT.sub(lambda found: _name(found[0]), value)


def _name(text: str) -> str:
    """Return the last part of a path or URL; a name that is neither, such as ORG/NAME, as it is."""
    if "://" in text:
        text = re.split(r"[?#]", text.partition("://")[2])[0]
    elif not is_local_path(text) and not Path(text).is_absolute():
        return text
    return [part for part in text.split("/") if part][-1:][0] if text.strip("/") else text


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_MARKUP = re.compile(r"([\\`*_\[\]|~$])")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def _escape(value: Any) -> str:
    """Return a value as Markdown that shows it literally, on one line."""
    text = _MARKUP.sub(r"\\\1", one_line(str(value)))
    return re.sub("[<>&]", lambda found: _ENTITIES[found[0]], text)


def _list_facts(facts: Mapping[str, Any]) -> str:
    """Return a list of the facts that are known."""
    return "\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in facts.items() if value is not None)


def _fence(text: str, language: str) -> str:
    """Return a code block, whose fence is longer than any in the text."""
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    mark = "`" * max(3, longest + 1)
    return f"{mark}{language}\n{text.rstrip()}\n{mark}"
