"""`dstrain init --from` answers by value: what changes learning is in the recipe, or is said; what means "not set" is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.init_from import ConvertedRecipe, convert_file
from dstrain.errors import lookup
from tests.contract.test_init_from import BY_DESIGN

LLAMA_FACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "lora",
    "dataset": "d",
    "template": "qwen",
    "per_device_train_batch_size": 1,
}
AXOLOTL = {
    "base_model": "m",
    "datasets": [{"path": "d.jsonl", "type": "chat_template"}],
    "micro_batch_size": 1,
    "adapter": "lora",
    "lora_r": 8,
    "lora_target_linear": True,
}
TRL = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "per_device_train_batch_size": 1}
MS_SWIFT = {"model": "m", "tuner_type": "lora", "dataset": "d.jsonl", "per_device_train_batch_size": 1}
ALIGN_ANYTHING: dict[str, Any] = {
    "train_cfgs": {"epochs": 1, "learning_rate": 1e-5, "per_device_train_batch_size": 1},
    "data_cfgs": {"train_data_files": "d.jsonl"},
    "model_cfgs": {"model_name_or_path": "m"},
}
FILES: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": LLAMA_FACTORY, "axolotl": AXOLOTL, "TRL": TRL, "ms-swift": MS_SWIFT, "align-anything": ALIGN_ANYTHING,
}  # fmt: skip


def convert(theirs: dict[str, Any], task: str | None = None) -> ConvertedRecipe:
    Path("theirs.yaml").write_text(yaml.safe_dump(theirs))
    return convert_file(Path("theirs.yaml"), task)


def convert_with(trainer: str, **keys: Any) -> ConvertedRecipe:
    return convert({**FILES[trainer], **keys}, "sft" if trainer in ("TRL", "align-anything") else None)


def values_of(made: ConvertedRecipe) -> Any:
    return yaml.safe_load(made.text)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# A word is the recipe key that the value is written to; None: the difference is said.
CHANGES: dict[str, list[tuple[str, Any, str | None]]] = {
    "LLaMA-Factory": [
        ("train_on_prompt", True, "options.assistant_only_loss"),
        ("mask_history", True, None),
        ("default_system", "You are a pirate.", None),
        ("enable_thinking", False, "model.chat_template_kwargs.enable_thinking"),
        ("disable_shuffling", True, None),
        ("mix_strategy", "interleave_under", None),
        ("interleave_probs", "0.7,0.3", None),
        ("add_tokens", "a,b", None),
        ("use_rslora", True, "model.lora.use_rslora"),
        ("loraplus_lr_ratio", 16.0, "optim.loraplus_lr_ratio"),
        ("pissa_init", True, None),
        ("lora_target", "q_proj,v_proj", "model.lora.targets"),
        ("additional_target", "embed_tokens", None),
        ("rope_scaling", "linear", None),
        ("shift_attn", True, None),
        ("split_special_tokens", True, None),
        ("neftune_noise_alpha", 5, "model.neftune_noise_alpha"),
        ("label_smoothing_factor", 0.1, None),
        ("lr_scheduler_kwargs", {"min_lr_rate": 0.1}, None),
        ("lr_scheduler_type", "cosine_with_min_lr", None),
        ("lr_scheduler_type", "constant_with_warmup", "optim.schedule"),
        ("lr_scheduler_type", "inverse_sqrt", None),
        ("warmup_steps", 20, "optim.warmup"),
        ("max_grad_norm", 0.3, "optim.clip"),
        ("optim", "adafactor", "optim.name"),
        ("optim", "lion_8bit", None),
        ("adam_beta2", 0.95, "optim.betas"),
        ("adam_epsilon", 1e-6, "optim.eps"),
        ("weight_decay", 0.1, "optim.weight_decay"),
        ("group_by_length", True, None),
        ("dataloader_drop_last", True, None),
        ("packing", True, None),
        ("neat_packing", True, None),
        ("cutoff_len", 99, "data.max_length"),
        ("ignore_pad_token_for_loss", False, None),
        ("average_tokens_across_devices", False, None),
        ("use_dora", True, "model.lora.dora"),
        ("num_train_epochs", 2.5, "epochs"),
        ("max_steps", 5, "steps"),
        ("val_size", 100, None),
        ("val_size", 0.1, "data.eval_fraction"),
        ("freeze_trainable_layers", 2, None),
        ("tool_format", "llama3", None),
        ("use_dft_loss", True, None),
        ("disable_gradient_checkpointing", True, "model.gradient_checkpointing"),
        ("pure_bf16", True, "precision"),
        ("bf16", True, "precision"),
        ("bf16", False, "precision"),
        ("template", "llama3", None),
        ("double_quantization", False, None),
        ("train_mm_proj_only", True, None),
    ],
    "axolotl": [
        ("train_on_inputs", True, "options.assistant_only_loss"),
        ("default_system_message", "You are a pirate.", None),
        ("chat_template_jinja", "{{x}}", "model.chat_template"),
        ("chat_template", "llama3", None),
        ("chat_template", "chatml", "model.chat_template"),
        ("curriculum_sampling", True, None),
        ("shuffle_merged_datasets", False, None),
        ("excess_length_strategy", "truncate", None),
        ("min_sample_len", 100, None),
        ("sample_packing", True, None),
        ("lora_modules_to_save", ["embed_tokens", "lm_head"], None),
        ("peft_use_rslora", True, "model.lora.use_rslora"),
        ("loraplus_lr_ratio", 16, "optim.loraplus_lr_ratio"),
        ("unfrozen_parameters", ["lm_head"], None),
        ("tokens", ["<a>"], None),
        ("special_tokens", {"eos_token": "</s>"}, None),
        ("resize_token_embeddings_to_32x", True, None),
        ("noisy_embedding_alpha", 5, "model.neftune_noise_alpha"),
        ("cosine_min_lr_ratio", 0.1, None),
        ("cosine_constant_lr_ratio", 0.5, None),
        ("lr_div_factor", 3, None),
        ("lr_groups", [{"name": "a", "modules": ["b"], "lr": 1e-5}], None),
        ("embedding_lr", 1e-6, "optim.groups"),
        ("optimizer", "lion_pytorch", None),
        ("optimizer", "muon", "optim.name"),
        ("optim_target_modules", ["a"], None),
        ("adam_epsilon", 1e-6, "optim.eps"),
        ("max_grad_norm", 0.3, "optim.clip"),
        ("val_set_size", 100, None),
        ("rl_beta", 0.3, None),
        ("dataset_exact_deduplication", True, None),
        ("rope_theta", 1e6, None),
        ("overrides_of_model_config", {"rope_scaling": {"type": "linear", "factor": 2}}, None),
        ("group_by_length", True, None),
        ("neftune_noise_alpha", 5, "model.neftune_noise_alpha"),
        ("eot_tokens", ["<e>"], None),
        ("train_on_eos", "all", None),
        ("tokenizer_use_mistral_common", True, None),
    ],
    "TRL": [
        ("assistant_only_loss", True, "options.assistant_only_loss"),
        ("completion_only_loss", False, "options.assistant_only_loss"),
        ("packing", True, None),
        ("packing_strategy", "wrapped", None),
        ("neftune_noise_alpha", 5, "model.neftune_noise_alpha"),
        ("loss_type", "dft", None),
        ("label_smoothing_factor", 0.1, None),
        ("chat_template_path", "c", None),
        ("eos_token", "<e>", None),
        ("dataset_text_field", "t", "data.columns"),
        ("lr_scheduler_kwargs", {"min_lr": 1}, None),
        ("dtype", "float32", "precision"),
        ("gradient_checkpointing", False, "model.gradient_checkpointing"),
        ("group_by_length", True, None),
        ("average_tokens_across_devices", False, None),
        ("optim_args", "x=1", None),
        ("truncation_mode", "keep_end", None),
        ("batch_size", 8, None),
    ],
    "ms-swift": [
        ("system", "You are a pirate.", None),
        ("agent_template", "hermes", None),
        ("loss_scale", "last_round", None),
        ("dataset_shuffle", False, None),
        ("train_dataloader_shuffle", False, None),
        ("lora_bias", "all", None),
        ("init_weights", "pissa", None),
        ("external_plugins", ["plugin.py"], None),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "name", "value", "key"),
    [(trainer, *row) for trainer, rows in CHANGES.items() for row in rows],
)
def test_a_value_that_changes_learning_is_in_the_recipe_or_said(
    trainer: str, name: str, value: Any, key: str | None
) -> None:
    made = convert_with(trainer, **{name: value})
    told = [line for line in made.differences if name in line and not any(part in line for part in BY_DESIGN)]
    if key is None:
        assert told, made.text
    else:
        assert lookup(values_of(made), tuple(key.split("."))) is not None, made.text
        line = next(one for one in made.text.splitlines() if "#" in one and name in one.partition("#")[2])
        assert not line.startswith("#"), made.text


DATA_SETS: list[tuple[str, Any]] = [
    ("type", "input_output"),
    ("type", "sharegpt"),
    ("type", "alpaca:unknown"),
    ("type", {"format": "{instruction} {weather}"}),
    ("roles_to_train", ["user", "assistant"]),
    ("roles_to_train", []),
    ("train_on_eos", "all"),
    ("train_on_eos", "none"),
    ("train_on_eot", "none"),
    ("message_field_training", "learn"),
    ("message_field_training_detail", "detail"),
    ("message_field_role", "who"),
    ("roles", {"user": ["asker"]}),
    ("chat_template", "llama3"),
    ("conversation", "vicuna_v1.1"),
    ("shards", 4),
    ("split_thinking", True),
    ("field_thinking", "thoughts"),
    ("field_human", "h"),
    ("drop_system_message", True),
    ("eot_tokens", ["<e>"]),
]


@pytest.mark.parametrize(("name", "value"), DATA_SETS)
def test_a_value_of_a_data_set_that_changes_learning_is_said(name: str, value: Any) -> None:
    made = convert({**AXOLOTL, "datasets": [{**AXOLOTL["datasets"][0], name: value}]})  # type: ignore[index, dict-item]
    assert [line for line in made.differences if f"datasets.{name}" in line], made.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("roles_to_train", ["assistant"]),
        ("train_on_eos", "turn"),
        ("message_field_training", "train"),
        ("roles", {"user": ["human", "user"], "assistant": ["gpt"]}),
        ("split_thinking", False),
        ("message_field_role", "from"),
        ("ds_type", "json"),
    ],
)
def test_a_value_of_a_data_set_that_is_what_is_done_here_is_not_said(name: str, value: Any) -> None:
    made = convert({**AXOLOTL, "datasets": [{**AXOLOTL["datasets"][0], name: value}]})  # type: ignore[index, dict-item]
    assert not [line for line in made.differences if "datasets." in line], made.differences


# Trainer -> their key, a value that means that it is not set, and what the recipe then has: (key, value), or (key,).
UNSET: dict[str, list[tuple[str, Any, str, Any]]] = {
    "LLaMA-Factory": [
        ("max_steps", -1, "epochs", 3),
        ("max_steps", 0, "epochs", 3),
        ("max_steps", None, "epochs", 3),
        ("max_steps", "none", "epochs", 3),
        ("num_train_epochs", "null", "epochs", 3),
        ("neftune_noise_alpha", 0, "model.neftune_noise_alpha", None),
        ("neftune_noise_alpha", "none", "model.neftune_noise_alpha", None),
        ("quantization_bit", "none", "model.quantize", None),
        ("max_samples", -1, "data.max_samples", None),
        ("lora_rank", "", "model.lora.rank", 8),
        ("warmup_steps", 0, "optim.warmup", 0),
        ("warmup_ratio", 0.0, "optim.warmup", 0),
        ("deepspeed", "none", "ds_config", None),
        ("save_total_limit", "null", "save.keep", None),
        ("loraplus_lr_ratio", "no", "optim.loraplus_lr_ratio", None),
    ],
    "TRL": [
        ("max_steps", -1, "epochs", 3),
        ("max_steps", "-1", "epochs", 3),
        ("lora_alpha", None, "model.lora", None),
        ("early_stopping_patience", 0, "eval.patience", None),
        ("max_prompt_length", "none", "data.max_prompt_length", None),
    ],
    "axolotl": [
        ("max_steps", 0, "epochs", 1),
        ("max_steps", -1, "epochs", 1),
        ("noisy_embedding_alpha", False, "model.neftune_noise_alpha", None),
        ("warmup_ratio", None, "optim.warmup", 0.03),
        ("deepspeed", False, "ds_config", None),
        ("early_stopping_patience", "no", "eval.patience", None),
        ("lora_dropout", 0, "model.lora.dropout", 0),
    ],
    "ms-swift": [
        ("max_steps", -1, "epochs", 3),
        ("quant_bits", None, "model.quantize", None),
        ("neftune_noise_alpha", "none", "model.neftune_noise_alpha", None),
        ("lora_dropout", 0, "model.lora.dropout", 0),
        ("weight_decay", 0, "optim.weight_decay", 0),
    ],
    "align-anything": [
        ("max_steps", -1, "epochs", 1),
        ("neftune_noise_alpha", 0, "model.neftune_noise_alpha", None),
    ],
}


@pytest.mark.parametrize(
    ("trainer", "name", "value", "key", "ours"), [(trainer, *row) for trainer, rows in UNSET.items() for row in rows]
)
def test_a_value_that_means_not_set_leaves_the_default(
    trainer: str, name: str, value: Any, key: str, ours: Any
) -> None:
    made = convert_with(trainer, **{name: value})
    assert lookup(values_of(made), tuple(key.split("."))) == ours, made.text
    assert not [line for line in made.differences if line.startswith(f"{name}:")], made.differences


def test_the_line_that_all_dumped_arguments_have_keeps_the_passes() -> None:
    text = convert_with("LLaMA-Factory", max_steps=-1).text
    assert "epochs: 3                            # num_train_epochs (default)" in text
    assert "max_steps: its value means that it is not set" in text
    assert "steps" not in yaml.safe_load(convert_with("TRL", max_steps=-1, num_train_epochs=2).text)


@pytest.mark.parametrize("trainer", FILES)
def test_a_constant_rate_has_no_warmup(trainer: str) -> None:
    name = "lr_scheduler" if trainer == "axolotl" else "lr_scheduler_type"
    made = values_of(convert_with(trainer, **{name: "constant", "warmup_ratio": 0.1}))
    assert made["optim"]["schedule"] == "constant"
    assert made["optim"]["warmup"] == 0
    made = values_of(convert_with(trainer, **{name: "constant_with_warmup", "warmup_ratio": 0.1}))
    assert made["optim"]["schedule"] == "constant"
    assert made["optim"]["warmup"] == 0.1


def test_no_16_bit_type_means_fp32() -> None:
    assert values_of(convert_with("TRL", bf16=False))["precision"] == "fp32"
    assert values_of(convert_with("TRL", bf16=False, fp16=True))["precision"] == "fp16"
    assert values_of(convert_with("LLaMA-Factory", bf16=False, fp16=False))["precision"] == "fp32"
    assert values_of(convert_with("TRL", bf16=False, dtype="bfloat16"))["precision"] == "bf16"
    assert "precision" not in values_of(convert_with("TRL", fp16=False))
    assert "precision" not in values_of(convert_with("axolotl", bf16="auto"))


def test_an_option_of_another_loss_is_no_fault() -> None:
    made = values_of(convert({**LLAMA_FACTORY, "stage": "dpo", "pref_loss": "sigmoid", "simpo_gamma": 0.5}))
    assert made["options"] == {"loss_type": "sigmoid"}
    made = values_of(convert({**LLAMA_FACTORY, "stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.5}))
    assert made["options"] == {"loss_type": "simpo", "simpo_gamma": 0.5}


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ({"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}, ""),
        ({"user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation"}, ""),
        ({"role_tag": "speaker", "content_tag": "text"}, "rename role_tag speaker, content_tag text in the file"),
        ({"user_tag": "asker"}, "rename user_tag asker in the file"),
        (
            {"assistant_tag": "user", "user_tag": "assistant"},
            "rename assistant_tag user, user_tag assistant in the file",
        ),
    ],
)
def test_tags_of_dataset_info_are_read_or_named(tags: dict[str, str], told: str) -> None:
    Path("data").mkdir()
    info = {"d": {"file_name": "d.json", "formatting": "sharegpt", "columns": {"messages": "turns"}, "tags": tags}}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    made = convert(LLAMA_FACTORY)
    assert values_of(made)["data"]["train"] == {"path": "data/d.json", "columns": {"turns": "conversations"}}
    lines = [line for line in made.differences if line.startswith("dataset.tags")]
    assert len(lines) == bool(told)
    assert told in "".join(lines)
    info["d"]["num_samples"] = 5
    Path("data/dataset_info.json").write_text(json.dumps(info))
    assert [line for line in convert(LLAMA_FACTORY).differences if line.startswith("dataset.num_samples")]


def write_records(**record: str) -> None:
    Path("d.jsonl").write_text(json.dumps(record) + "\n")


def convert_data_set(**keys: Any) -> ConvertedRecipe:
    return convert({**AXOLOTL, "datasets": [{"path": "d.jsonl", **keys}]})


def test_the_text_of_a_completion_is_trained_on_alone() -> None:
    write_records(instruction="Add 1.", output="2", id="x")
    made = convert_data_set(type="completion", field="output")
    columns = {"output": "text", "instruction": None, "id": None}
    assert values_of(made)["data"]["train"] == {"path": "d.jsonl", "columns": columns}
    assert any("a text above sequence_len is cut into several there" in line for line in made.differences)
    Path("d.jsonl").unlink()
    assert any("need null in `columns`" in line for line in convert_data_set(type="completion").differences)


@pytest.mark.parametrize("kind", ["chatml.ultra", "chatml.intel", "chatml"])
def test_pairs_in_chatml_get_its_template(kind: str) -> None:
    made = convert({**AXOLOTL, "rl": "dpo", "datasets": [{"path": "d.jsonl", "type": kind}]})
    assert "<|im_start|>" in values_of(made)["model"]["chat_template"]
    assert any("TRL adds EOS after <|im_end|> there" in line for line in made.differences)


def test_a_question_of_alpaca_with_an_input_has_it_in_the_system_turn() -> None:
    write_records(instruction="Add.", input="1 and 2", output="3", system="Be brief.")
    made = values_of(convert_data_set(type="alpaca"))
    assert made["data"]["train"] == {"path": "d.jsonl", "columns": {"input": "system", "system": None}}
    assert "### Instruction:\\n" in made["model"]["chat_template"]
    form = {"format": "Q {instruction} {input} A", "field_instruction": "q", "field_output": "a", "field_input": "i"}
    write_records(q="Add.", i="1", a="2")
    made = values_of(convert_data_set(type=form))
    assert made["data"]["train"]["columns"] == {"q": "instruction", "a": "output", "i": "system"}
    write_records(q="Add.", i="1", a="2", system="Be brief.")
    assert any("datasets.type" in line for line in convert_data_set(type=form).differences)


def test_forms_of_prompts_that_one_template_cannot_write_are_said() -> None:
    write_records(instruction="Add.", output="3")
    sets = [{"path": "d.jsonl", "type": "alpaca"}, {"path": "d.jsonl", "type": "chat_template"}]
    made = convert({**AXOLOTL, "datasets": sets})
    assert "chat_template" not in values_of(made)["model"]
    assert any("prompts of this form need a model.chat_template, and other data sets another" in one for one in made.differences)  # fmt: skip


def test_a_data_set_is_looked_up_by_its_name_although_a_folder_has_it() -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"data": {"file_name": "d.json"}}))
    assert values_of(convert({**LLAMA_FACTORY, "dataset": "data"}))["data"]["train"] == "data/d.json"


def test_an_evaluation_is_switched_by_its_data() -> None:
    for value in (True, False):
        assert "eval" not in values_of(convert_with("TRL", do_eval=value))
