"""Key aliases of other frameworks, renamed options, and recipe keys that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dstrain.source_map import KeyPath

KEY_ALIASES: dict[str, str] = {
    # HF Trainer and TRL
    "per_device_train_batch_size": "batch.micro",
    "per_device_eval_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulate",
    "learning_rate": "optim.lr",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "output_dir": "--run-dir",
    "overwrite_output_dir": "a new --run-dir",
    "warmup_steps": "optim.warmup",
    "warmup_ratio": "optim.warmup",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.clip",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "optim_type": "optim.name",
    "adafactor": "optim.name: adafactor",
    "use_muon": "optim.name: muon",
    "logging_steps": "log.every",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "evaluation_strategy": "eval.every",
    "save_steps": "save.every",
    "save_strategy": "save.every",
    "save_total_limit": "save.keep",
    "load_best_model_at_end": "`dstrain export --step best`",
    "metric_for_best_model": "eval.metric",
    "greater_is_better": "eval.best",
    "report_to": "log.tensorboard or log.wandb",
    "run_name": "log.wandb.name",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "deepspeed": "ds_config",
    "resume_from_checkpoint": "--resume",
    "dataloader_num_workers": "data.workers",
    "dataloader_prefetch_factor": "data.prefetch",
    "dataloader_pin_memory": "data.pin",
    "ddp_timeout": "timeout_minutes",
    "data_seed": "seed",
    "torch_compile": "compile",
    "full_determinism": "deterministic",
    "max_seq_length": "data.max_length",
    "model_max_length": "data.max_length",
    "attn_implementation": "model.attn_implementation",
    "torch_dtype": "model.dtype",
    "model_init_kwargs": "model",
    "dataset_name": "data.train",
    "dataset_config": "the `name` in data.train: {path, name}",
    "dataset_config_name": "the `name` in data.train: {path, name}",
    "dataset_train_split": "the `split` in data.train: {path, split}",
    "dataset_test_split": "the `split` in data.eval: {path, split}",
    "hub_token": "the environment variable HF_TOKEN",
    "remove_unused_columns": "data.columns",
    **dict.fromkeys(("packing", "packing_strategy", "eval_packing", "padding_free"), "batch.packing"),
    "use_prefix_sharing": "batch.prefix_sharing",
    "completion_only_loss": "options.assistant_only_loss",
    "use_peft": "model.lora",
    "load_in_4bit": "model.quantize: nf4",
    "load_in_8bit": "model.quantize: int8",
    **dict.fromkeys(("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "double_quantization"), "model.quantize: nf4"),
    "bnb_4bit_compute_dtype": "precision",
    # LLaMA-Factory
    "model_name_or_path": "model.path",
    "stage": "task",
    "finetuning_type": "model.lora",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target": "model.lora.targets",
    "use_dora": "model.lora.dora",
    **dict.fromkeys(("moe_aux_loss_coef", "router_aux_loss_coef"), "model.router_aux_loss_coef"),
    "quantization_bit": "model.quantize",
    "dataset": "data.train",
    "dataset_dir": "the folder in data.train's path",
    "subset": "the `name` in data.train: {path, name}",
    "template": "model.chat_template, or the template of model.tokenizer",
    "hf_hub_token": "the environment variable HF_TOKEN",
    "eval_dataset": "data.eval",
    "val_size": "data.eval_fraction",
    "cutoff_len": "data.max_length",
    "preprocessing_num_workers": "data.workers",
    "neat_packing": "batch.packing",
    "flash_attn": "model.attn_implementation",
    "freeze_trainable_layers": "model.freeze",
    "pref_beta": "options.beta",
    "pref_loss": "options.loss_type",
    "plot_loss": "log.tensorboard",
    "train_on_prompt": "options.assistant_only_loss",
    # Axolotl
    **dict.fromkeys(("sample_packing", "pack_sequences"), "batch.packing"),
    # DeepSpeed
    "train_batch_size": "batch.total",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_clipping": "optim.clip",
    "zero_optimization": "the JSON that ds_config names",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
}
"""Name in another framework -> the recipe key for it."""

UNSUPPORTED_VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("compile", bool, "leave it out: minutes of compilation gave no clear gain (docs/measurements/README.md)"),
    ("launch.slurm.partition", bool, "pass it to sbatch; launchers/slurm.sbatch is a beginning"),
    ("launch.slurm.account", bool, "pass it to sbatch; launchers/slurm.sbatch is a beginning"),
    ("launch.slurm.time", bool, "pass it to sbatch; launchers/slurm.sbatch is a beginning"),
    ("launch.slurm.setup", bool, "write the lines into your sbatch file"),
)
"""(key, condition on its value, fix): values of features that do not exist yet."""

RENAMED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vlm": {"one_sample_per_image": "group_by_image", "flip": "horizontal_flip", "shift": "random_translate"},
}
"""Task -> its renamed options, old name -> new name. The old names are accepted until version 2."""
RENAMED_CHAT_TEMPLATES: Mapping[str, str] = {"turns": "human_assistant"}
"""Renamed values of model.chat_template, old -> new."""
RENAMED_LAUNCH_KEYS: Mapping[str, str] = {"silence_seconds": "heartbeat_timeout_seconds"}
"""Renamed keys of `launch`, old -> new."""
RENAMED_MODEL_KEYS: Mapping[str, str] = {"attention": "attn_implementation"}
"""Renamed keys of `model`, old -> new."""


def rename_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's values with new key and option names. A key that is set under both names stays as it is."""
    found = {**values}
    for name, renamed in _deprecated_keys(values):
        block = values.get(name)
        if isinstance(block, dict) and renamed.keys() & block.keys():
            new = {old: old if key in block else key for old, key in renamed.items()}
            found[name] = {new.get(key, key): value for key, value in block.items()}
    return found


def _deprecated_keys(values: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, str]], ...]:
    """Return (block, its renamed keys), with the options of the recipe's task."""
    options = RENAMED_OPTIONS.get(str(values.get("task")), {})
    return ("launch", RENAMED_LAUNCH_KEYS), ("model", RENAMED_MODEL_KEYS), ("options", options)


def list_deprecated_keys(values: Mapping[str, Any]) -> list[tuple[KeyPath, KeyPath]]:
    """Return (old key, new key) of all renamed keys, with the options of the recipe's task."""
    return [((block, old), (block, new)) for block, renamed in _deprecated_keys(values) for old, new in renamed.items()]


def find_deprecations(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each old name in the recipe's values."""
    for (name, old), (_, new) in list_deprecated_keys(values):
        block = values.get(str(name))
        if isinstance(block, dict) and old in block:
            yield f"{name}.{old} is deprecated; write {name}.{new}"
    model = values.get("model")
    template = model.get("chat_template") if isinstance(model, dict) else None
    if isinstance(template, str) and template in RENAMED_CHAT_TEMPLATES:
        new = RENAMED_CHAT_TEMPLATES[template]
        yield f"model.chat_template: {template} is deprecated; write {new}"
