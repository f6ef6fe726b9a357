"""The files of an exported folder: weights under the names of their base, tokenizer, generation config and recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.config import dump_recipe
from dstrain.models.adapters import expected_warnings_hidden
from dstrain.models.folder import find_quantization
from dstrain.models.params import unwrap_peft
from dstrain.models.router_loss import router_logits_disabled
from dstrain.models.weight_names import keep_file_names, read_base_names
from dstrain.models.weights import save_module
from dstrain.tasks import Task
from dstrain.tasks.common.registry import copy_task_files
from dstrain.tasks.common.task import EXPORT_RECIPE
from dstrain.training.generation_config import write_generation_config


def keep_base_names(model: Any, task: Task) -> frozenset[str]:
    """Let a model be saved under the names of its base's files, and return them; empty where there are none to compare.

    Adapters and a task's own classes have names of their own; a quantized base has more tensors.
    """
    from transformers import PreTrainedModel

    of_transformers = isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")
    names = read_base_names(task.recipe.model)
    if not names or not of_transformers:
        return frozenset()
    keep_file_names(model, names)
    return names if find_quantization(model.config.to_dict()) is None else frozenset()


def write_model_folder(
    model: Any, folder: Path, task: Task, tokenizer: Any, is_merged: bool, max_shard_size: str
) -> None:
    """Write weights, tokenizer or processor, generation config and recipe into an existing folder.

    `tokenizer`: of a model that writes text, else None. `is_merged`: adapters were merged into the model.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel

    if hasattr(model, "save_pretrained"):
        sizes = {"max_shard_size": max_shard_size} if isinstance(model, PreTrainedModel | PeftModel) else {}
        # transformers cannot generate with a config that asks for the router's logits.
        with router_logits_disabled(unwrap_peft(model)), expected_warnings_hidden():
            model.save_pretrained(str(folder), **sizes)
    else:
        save_module(model, folder)
    copy_task_files(task, folder)
    task.export.save_extras(folder)
    if tokenizer is not None:
        write_generation_config(unwrap_peft(model).generation_config, tokenizer, folder)
    (folder / EXPORT_RECIPE).write_text(dump_recipe(task.export.recipe(is_merged)), encoding="utf-8")
