"""`dstrain init --from`: another trainer's configuration becomes a recipe that a run accepts, and no key is lost silently."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dstrain.cli import main
from dstrain.commands.init_scripts import read_command
from dstrain.config.aliases import iter_foreign_keys
from dstrain.config.schema import EvalConfig
from dstrain.errors import lookup
from tests.cells import mark_slow
from tests.contract.lora_cases import save_base
from tests.tiny import tiny_recipe
from tests.vocabulary import message, write_jsonl


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and data of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    save_base(str(folder / "model"), tiny_recipe("sft", folder))
    write_jsonl(folder / "alpaca.jsonl", [{"instruction": f"Add {n}.", "output": str(n)} for n in range(20)])
    write_jsonl(
        folder / "chats.jsonl", [{"dialog": [message("user", f"{n}?"), message("assistant", "yes")]} for n in range(20)]
    )
    write_jsonl(folder / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(20)])
    info = {
        "mine": {"file_name": "../alpaca.jsonl"},
        "chats": {"file_name": "../chats.jsonl", "columns": {"messages": "dialog"}},
    }
    (folder / "data").mkdir()
    (folder / "data/dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def convert(name: str, text: str, *words: str) -> dict[str, Any]:
    """Write their file, convert it, and return the recipe."""
    Path(name).write_text(text)
    result = invoke("init", *words, "--from", name)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = yaml.safe_load(result.stdout)
    return values


def refuse(text: str, name: str = "theirs.yaml", *words: str) -> str:
    """Write their file, and return why it is refused; nothing is written."""
    Path(name).write_text(text)
    result = invoke("init", *words, "--from", name, "--to", "out.yaml")
    assert result.exit_code == 2, result.output
    assert not Path("out.yaml").exists()
    return result.stderr


LLAMA_FACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: mine, chats
template: llama3
cutoff_len: 64
preprocessing_num_workers: 2
dataloader_num_workers: 1
output_dir: saves/x
overwrite_output_dir: true
save_only_model: false
logging_steps: 5
save_steps: 20
plot_loss: true
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: "1.0e-4"
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
ddp_timeout: 1800
optim: adamw_torch
val_size: 0.1
eval_strategy: steps
eval_steps: 10
"""
AXOLOTL = """
base_model: model
tokenizer_type: AutoTokenizer
strict: false
datasets:
  - path: json
    data_files: [chats.jsonl]
    ds_type: json
    type: chat_template
    field_messages: dialog
val_set_size: 0.05
adapter: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 64
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: no
gradient_checkpointing: yes
warmup_steps: 2
evals_per_epoch: 4
saves_per_epoch: 1
wandb_project:
special_tokens: {pad_token: "<pad>"}
output_dir: ./outputs
"""
TRL = """
model_name_or_path: model
dataset_name: pairs.jsonl
learning_rate: 5.0e-7
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 64
beta: 0.2
loss_type: [ipo]
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, v_proj]
max_steps: 10
gradient_checkpointing: true
output_dir: out
push_to_hub: true
"""
MS_SWIFT = r"""#!/bin/bash
# 8 GPUs
NPROC_PER_NODE=8 \
swift sft \
    --model model \
    --tuner_type full \
    --dataset chats.jsonl#10 --columns '{"dialog": "messages"}' \
    --torch_dtype float32 --max_length 64 --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 16 / 8) \
    --attn_impl eager --save_total_limit -1 --use_liger_kernel  # fast
"""
ALIGN_ANYTHING = """
train_cfgs:
  epochs: 3
  seed: 42
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 2
  learning_rate: 1.e-6
  lr_scheduler_type: cosine
  lr_warmup_ratio: 0.03
  weight_decay: 0.05
  adam_betas: [0.9, 0.95]
  bf16: False
  eval_strategy: epoch
  eval_interval: 10
  scale_coeff: 0.1
  ds_cfgs: ds_z3_config.json
data_cfgs: {train_datasets: null, train_data_files: pairs.jsonl, train_split: null, train_size: 10}
logger_cfgs: {log_type: wandb, log_project: mine, log_run_name: first, output_dir: null, save_total_limit: 1}
model_cfgs: {model_name_or_path: model, trust_remote_code: True, model_max_length: 64}
lora_cfgs: {use_lora: False, r: 16, lora_alpha: 16, target_modules: [q_proj]}
bnb_cfgs: {use_bnb: False, load_in_4bit: True, bnb_4bit_quant_type: nf4}
special_tokens: null
"""
WALKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LLaMA-Factory": (
        "llama_factory.yaml",
        LLAMA_FACTORY,
        {
            "task": "sft",
            "model": {"path": "model", "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}},
            "data": {
                "train": [
                    "data/../alpaca.jsonl",
                    {"path": "data/../chats.jsonl", "columns": {"dialog": "conversations"}},
                ],
                "eval_fraction": 0.1,
                "max_length": 64,
                "workers": 1,
            },
            "batch": {"micro": 2, "accumulate": 4},
            "optim": {"name": "adamw", "lr": 1e-4, "schedule": "cosine", "warmup": 0.1},
            "epochs": 2.0,
            "timeout_minutes": 30.0,
            "log": {"every": 5},
            "eval": {"every": 10},
            "save": {"every": 20, "keep": None},
            "seed": 42,
        },
    ),
    "axolotl": (
        "axolotl.yaml",
        AXOLOTL,
        {
            "task": "sft",
            "model": {
                "path": "model",
                "lora": {"rank": 8, "alpha": 16, "dropout": 0.05, "targets": "all-linear"},
                "gradient_checkpointing": True,
            },
            "data": {
                "train": {"path": "chats.jsonl", "columns": {"dialog": "messages"}},
                "eval_fraction": 0.05,
                "max_length": 64,
            },
            "batch": {"micro": 2, "accumulate": 2},
            "optim": {"name": "adamw", "lr": 2e-4, "schedule": "cosine", "warmup": 2},
            "epochs": 1,
            "eval": {"every": "epoch"},
            "save": {"every": "epoch", "keep": 4},
            "seed": 42,
        },
    ),
    "TRL": (
        "trl_dpo.yaml",
        TRL,
        {
            "task": "dpo",
            "options": {"beta": 0.2, "loss_type": "ipo"},
            "model": {
                "path": "model",
                "lora": {"rank": 8, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
                "gradient_checkpointing": True,
            },
            "data": {"train": "pairs.jsonl", "max_length": 64},
            "batch": {"micro": 2, "accumulate": 8},
            "optim": {"lr": 5e-7, "schedule": "linear", "warmup": 0},
            "steps": 10,
            "save": {"every": 500, "keep": None},
            "seed": 42,
        },
    ),
    "ms-swift": (
        "train.sh",
        MS_SWIFT,
        {
            "task": "sft",
            "model": {"path": "model", "attn_implementation": "eager", "kernels": "auto"},
            "precision": "fp32",
            "data": {"train": "chats.jsonl", "max_length": 64, "columns": {"dialog": "messages"}},
            "batch": {"micro": 1},
            "optim": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine", "warmup": 0},
            "epochs": 3,
            "save": {"every": 500, "keep": None},
            "seed": 42,
        },
    ),
    "align-anything": (
        "dpo.yaml",
        ALIGN_ANYTHING,
        {
            "task": "dpo",
            "options": {"beta": 0.1},
            "model": {"path": "model"},
            "data": {"train": "pairs.jsonl", "max_length": 64, "max_samples": 10},
            "ds_config": "zero3",
            "batch": {"micro": 1, "accumulate": 2},
            "precision": "fp32",
            "optim": {"lr": 1e-6, "betas": [0.9, 0.95], "weight_decay": 0.05, "schedule": "cosine", "warmup": 0.03},
            "epochs": 3,
            "seed": 42,
            "log": {"wandb": {"project": "mine", "name": "first"}},
            "eval": {"every": "epoch"},
            "save": {"keep": 1},
        },
    ),
}


@pytest.mark.parametrize("trainer", mark_slow(WALKS, [*WALKS][1:]))
def test_a_configuration_becomes_a_recipe_that_a_run_accepts(trainer: str, folder: Path) -> None:
    name, text, expected = WALKS[trainer]
    Path(name).write_text(text)
    result = invoke("init", "--from", name, "--to", "recipe.yaml")
    assert result.exit_code == 0, result.output
    assert f"recipe.yaml: from a configuration of {trainer}" in result.stdout
    assert yaml.safe_load(Path("recipe.yaml").read_text()) == expected
    planned = invoke("train", "recipe.yaml", "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert f"path: {folder}/model" in planned.output
    refused = invoke("train", name)
    if name.endswith(".yaml"):
        assert refused.exit_code == 2
        last = refused.stderr.splitlines()[-1]
        fix = f"`dstrain init --from {name} --to recipe.yaml` writes the recipe"
        assert last == f"{name}: is a configuration of {trainer}; {fix}"
        assert "known here" not in refused.stderr


@pytest.mark.parametrize("trainer", WALKS)
def test_every_key_is_in_the_recipe_or_in_a_comment(trainer: str, folder: Path) -> None:
    name, text, _ = WALKS[trainer]
    Path(name).write_text(text)
    recipe = invoke("init", "--from", name).stdout
    comments = {word for line in recipe.splitlines() for word in re.split(r"[\s,:;.]+", line.partition("#")[2])}
    values = read_command(Path(name))[0].values if name.endswith(".sh") else yaml.safe_load(text)
    keys = {key for key in iter_foreign_keys(values) if lookup(values, key) not in (None, [], {})}
    assert {key[-1] for key in keys} - {"data_files", "field_messages", "path"} <= comments


def test_a_file_that_is_found_stays_beside_one_to_fill_in(folder: Path) -> None:
    recipe = convert("theirs.yaml", "stage: sft\nmodel_name_or_path: model\ndataset: mine, other, third\n1: 2\n")
    missing = ["FILL IN the file of other", "FILL IN the file of third"]
    assert recipe["data"]["train"] == ["data/../alpaca.jsonl", *missing]
    said = invoke("init", "--from", "theirs.yaml", "--to", "recipe.yaml")
    assert "data.train FILL IN the file of other: there is no such file" in invoke("train", "recipe.yaml").stderr
    said = invoke("init", "--from", "theirs.yaml")
    assert "# FILL IN: the file of other third, in no dataset_info.json here" in said.stdout
    assert "fill in data.train" in said.stderr
    assert "1: no trainer has this key" in said.stdout


def test_a_table_of_data_sets_above_the_file_is_found(folder: Path) -> None:
    Path("examples/lora").mkdir(parents=True)
    text = "stage: sft\nmodel_name_or_path: model\ndataset: mine\n"
    assert convert("examples/lora/theirs.yaml", text)["data"]["train"] == "data/../alpaca.jsonl"


def test_a_part_of_a_split_is_a_number_of_samples_or_said(folder: Path) -> None:
    text = "base_model: model\npretraining_dataset: [{path: org/name, split: 'train[:10%]'}]\n"
    Path("theirs.yaml").write_text(text)
    assert "all of train is used, not train[:10%]" in invoke("init", "--from", "theirs.yaml").stderr
    assert "data.train and data.eval are the same set: train[90%:] and train[:90%]" in refuse(
        "base_model: model\ndatasets: [{path: org/name, split: 'train[:90%]'}]\n"
        "test_datasets: [{path: org/name, split: 'train[90%:]'}]\n"
    )
    text = "trl sft --eval_strategy steps --model_name_or_path model --dataset_name org/name --dataset_train_split train[:1000]"
    assert convert("run.sh", text)["data"]["max_samples"] == 1000


def test_an_evaluation_without_steps_is_as_frequent_as_there(folder: Path) -> None:
    begin = "stage: sft\nmodel_name_or_path: model\neval_strategy: steps\n"
    assert convert("theirs.yaml", begin + "logging_steps: 7\n")["eval"]["every"] == 7
    assert convert("theirs.yaml", begin)["eval"]["every"] == 500
    assert convert("theirs.yaml", "base_model: model\n")["eval"]["every"] == "epoch"


def test_a_fault_of_an_option_names_their_key_and_its_line(folder: Path) -> None:
    text = "model_name_or_path: model\nloss_type: [hinge, nowhere]\n"
    assert "dpo.yaml:2 loss_type -> options.loss_type: is ['hinge', 'nowhere']" in refuse(text, "dpo.yaml")


def test_a_wait_without_a_limit_is_left_out(folder: Path) -> None:
    begin = "stage: sft\nmodel_name_or_path: model\n"
    assert "timeout_minutes" not in convert("theirs.yaml", begin + "ddp_timeout: 180000000\n")


def test_what_is_not_there_is_to_be_filled_in(folder: Path) -> None:
    shutil.rmtree("data")
    text = "stage: rm\nfinetuning_type: full\ndataset: identity\ncutoff_len: 32\n"
    Path("theirs.yaml").write_text(text)
    result = invoke("init", "--from", "theirs.yaml", "--to", "recipe.yaml")
    assert result.stdout.startswith(
        "recipe.yaml: from a configuration of LLaMA-Factory; fill in model.path, data.train"
    )
    recipe = Path("recipe.yaml").read_text()
    assert "FILL IN: the file of identity, in no dataset_info.json here" in recipe
    assert yaml.safe_load(recipe)["model"] == {"path": None}
    assert yaml.safe_load(recipe)["task"] == "rm"


@pytest.mark.parametrize(("heading", "name"), [("TRL", "train_dpo.sh"), ("LLaMA-Factory", "llama3_lora_sft.yaml")])
def test_a_recipe_on_the_page_is_that_of_the_file_beside_it(
    heading: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
    found = re.search(rf"\n## {heading}: .*?```text\n(.*?)```.*?```yaml\n(.*?)```", page, flags=re.S)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    files = {one: {"file_name": f"{one}.json"} for one in ("identity", "alpaca_en_demo")}
    Path("data/dataset_info.json").write_text(json.dumps(files))
    Path(name).write_text(found[1])
    assert invoke("init", "--from", name).stdout == found[2]


BEGIN = {
    "LLaMA-Factory": "stage: sft\nmodel_name_or_path: model\ncutoff_len: 8\n",
    "axolotl": "base_model: model\n",
    "TRL": "model_name_or_path: model\ndataset_name: chats.jsonl\nassistant_only_loss: true\n",
}


BY_DESIGN = (
    "steps of 8 are 35 steps, not 36",
    "peak / steps of the warmup",
    "a longer record loses",
    "the line break that",
)
"""Parts of the lines on numbers that no recipe makes equal."""


def differing_lines(result: Result) -> list[str]:
    """Return the lines on what is learnt otherwise, but for those of every file."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.startswith("  differs: ")]
    return [line for line in lines if not any(part in line for part in BY_DESIGN)]


@pytest.mark.parametrize(
    ("trainer", "text", "told"),
    [
        ("axolotl", "sample_packing: true", "sample_packing: a sample of their step is a row filled with records"),
        ("axolotl", "sample_packing: false", None),
        ("LLaMA-Factory", "neat_packing: true", "neat_packing: a sample of their step"),
        ("TRL", "packing: true", "packing: a sample of their step"),
        ("axolotl", "chat_template: llama3", "chat_template: the tokenizer's own chat template is used; write"),
        ("axolotl", "chat_template: chatml", None),
        ("axolotl", "chat_template: tokenizer_default", None),
        ("LLaMA-Factory", "template: llama3", "template: the tokenizer's own chat template is used"),
        ("axolotl", "special_tokens: {pad_token: x}", "special_tokens: not supported (the special tokens are"),
        ("axolotl", "unfrozen_parameters: [lm_head]", "unfrozen_parameters: here it is model.freeze"),
        ("axolotl", "model_config: {output_router_logits: true}", "model_config: here it is model.config"),
        ("TRL", "use_peft: true", "lora_target_modules (default): PEFT chooses there"),
        ("axolotl", "reward_model: true\nnum_labels: 1", None),
        ("axolotl", "datasets: [{path: a.jsonl, field_thinking: reasoning, train_on_last_step_only: false}]", None),
        ("axolotl", "datasets: [{path: a.jsonl, message_property_mappings: {role: who}}]", "message_property_mappings"),
        ("TRL", "remove_unused_columns: false", None),
        ("LLaMA-Factory", "use_swanlab: true\ntemperature: 0.5\nflash_attn: xformers", None),
        ("axolotl", "evals_per_epoch: 4", None),
        ("TRL", "dataset_text_field: words", None),
        (
            "axolotl",
            "plugins: [axolotl.integrations.liger.LigerPlugin]\noutput_dir: x\nloss_watchdog_threshold: 5",
            None,
        ),
    ],
)
def test_what_is_learnt_otherwise_is_said_and_nothing_else(
    trainer: str, text: str, told: str | None, folder: Path
) -> None:
    Path("sft.yaml").write_text(f"{BEGIN[trainer]}{text}\n")
    result = invoke("init", "--from", "sft.yaml")
    assert result.exit_code == 0, result.output
    lines = differing_lines(result)
    assert len(lines) == (told is not None), lines
    assert (told or "") in result.stderr


@pytest.mark.parametrize(("metric", "best"), [("eval_accuracy", "max"), ("eval_loss", "min")])
def test_the_best_checkpoint_is_that_of_the_metrics_direction(metric: str, best: str, folder: Path) -> None:
    text = f"stage: rm\nmodel_name_or_path: model\nmetric_for_best_model: {metric}\n"
    assert EvalConfig.model_validate(convert("theirs.yaml", text)["eval"]).best == best
    assert convert("theirs.yaml", text + "greater_is_better: false\n")["eval"]["best"] == "min"


METHODS = {
    "model: x\nmodel_class: llm\npeft_config: {name: lora, r: 16}": "is a file of LLaMA-Factory's version 1, which is not read",
    "stage: ppo": "stage: is ppo, which is not supported",
    "stage: sft\nfinetuning_type: oft": "finetuning_type: is oft, which is not supported; LoRA and full training are",
    "rl: grpo\nbase_model: x": "theirs.yaml:1 rl: is grpo, which is not supported",
    "rlhf_type: gkd": "rlhf_type: is gkd",
    "tuner_type: lora\ntask_type: seq_cls": "task_type: is seq_cls, which is not supported",
    "cutoff_len: 8\nuse_galore: true": "use_galore: is True, which is not supported; there are no optimizers other than",
    "compute_environment: LOCAL_MACHINE": "is a launch configuration of accelerate",
    '{"zero_optimization": {"stage": 2}}': "is a DeepSpeed JSON; `dstrain presets --adopt theirs.yaml`",
    "task: sft\nmodel: {path: x}": "is a recipe of dstrain already",
    "a: 1": "is no configuration of align-anything, axolotl, ms-swift, LLaMA-Factory, TRL",
    "[1, 2]": "is a list; a recipe is a mapping",
    "model_name_or_path: x\nlearning_rate: 1": "does not say the method, which TRL has in a script; name the task: `dstrain init dpo",
    "stage: sft\nmodel_name_or_path: model\nexport_dir: x": "exports a model; `dstrain export",
}


@pytest.mark.parametrize("text", METHODS)
def test_another_method_is_refused_and_nothing_is_written(text: str, folder: Path) -> None:
    assert METHODS[text] in refuse(text)


FAULTS = {
    "learning_rate: -1": "theirs.yaml:2 learning_rate -> optim.lr: must be greater than or equal to 0, got -1",
    "per_device_train_batch_size: 2\nmicro_batch_size: 4": "theirs.yaml:3 micro_batch_size: gives batch.micro 4, but per_device_train_batch_size 2; keep one of them",
    "learning_rate: 1e-4\nlr: 1e-5": "keep one of them",
    "bf16: true\nfp16: true": "theirs.yaml:3 fp16: gives precision fp16, but bf16 bf16; keep one of them",
    "lora_rank: 8\nlora_rank: 16": "theirs.yaml:3 lora_rank: is set twice; keep one of them",
    "seed: !!python/object/apply:os.system ['touch trap']": "a tag (`!name`), which is not accepted",
    "deepspeed: broken.json": "theirs.yaml:2 deepspeed: broken.json:1:2: not valid JSON",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_names_their_key_and_its_line(text: str, folder: Path) -> None:
    Path("broken.json").write_text("{,}")
    assert FAULTS[text] in refuse(f"stage: sft\n{text}\n")
    assert not Path("trap").exists()


ODD = """
common: &common {learning_rate: 1.0e-4}
<<: *common
stage: dpo
model_name_or_path: model
dataset: [mine, chats]
num_train_epochs: "3"
lora_rank:
eval_steps: ""
pref_beta: ".1"
logging_steps: 0.1
fp16: no
frobnicate: {a: 1}
leraning_rate: 3
optim: rmsprop
lr_scheduler_type: polynomial
report_to: [swanlab, wandb, mlflow]
save_strategy: "no"
max_steps: -1
warmup_steps: 0
val_size: 100
"""


def test_odd_values_are_read_and_unknown_keys_are_named(folder: Path) -> None:
    recipe = convert("odd.yaml", ODD)
    assert recipe["optim"] == {"lr": 1e-4, "warmup": 0}
    assert recipe["epochs"] == 3
    assert recipe["options"] == {"beta": 0.1}
    assert recipe["model"]["lora"] == {"rank": 8, "alpha": 16}
    assert recipe["log"] == {"wandb": {"project": "huggingface"}, "sinks": ["dstrain.report.sinks.MLflowSink"]}
    said = invoke("init", "--from", "odd.yaml").stdout
    for words in (
        "frobnicate: no trainer has this key",
        "leraning_rate: no trainer has this key; did you mean 'learning_rate'?",
        "optim: optim.name has no `rmsprop`",
        "lr_scheduler_type: optim.schedule has no `polynomial`",
        "val_size: data.eval_fraction is a share of the records, below 1",
        "report_to: log.sinks takes a class of yours for swanlab",
        "save_strategy: the last checkpoint and the best are kept",
    ):
        assert words in said, words


@pytest.mark.slow
def test_a_secret_is_neither_copied_nor_printed(folder: Path) -> None:
    names = (
        "hub_token",
        "hf_hub_token",
        "swanlab_api_key",
        "wandb_api_key",
        "comet_api_key",
        "some_secret",
        "push_to_hub_token",
    )
    secret = "Xk29sLpQ88vv"
    text = "stage: sft\nmodel_name_or_path: model\n" + "".join(f"{name}: {secret}\n" for name in names)
    text += f"env: {{WANDB_API_KEY: {secret}}}\nENV: [HF_TOKEN={secret}]\n"
    Path("theirs.yaml").write_text(text)
    converted = invoke("init", "--from", "theirs.yaml", "--to", "recipe.yaml")
    assert converted.exit_code == 0
    assert secret not in converted.output + Path("recipe.yaml").read_text() + invoke("train", "theirs.yaml").output
    told = refuse(text + f"dataset: https://me:{secret}@host/x.jsonl\nlearning_rate: -1\nhub_token : {secret}y\n")
    assert secret not in told


def test_values_that_no_recipe_can_hold_are_refused_or_listed(folder: Path) -> None:
    begin = "stage: sft\nmodel_name_or_path: model\n"
    for line in ("logging_steps: .inf", "save_steps: .inf", "save: 3", "adapter_name_or_path: true", "val_size: .nan",
                 "dataset: [null, 3]", "learning_rate: [1]", "save_total_limit: abc"):  # fmt: skip
        Path("theirs.yaml").write_text(f"{begin}{line}\n")
        result = invoke("init", "--from", "theirs.yaml")
        assert result.exit_code == 0, result.output
    assert "theirs.yaml:3 lora_target -> model.lora.targets: must be text or a list" in refuse(
        f"{begin}lora_target: {{a: 1}}\n"
    )
    assert convert("theirs.yaml", begin + "chat_template_kwargs: {enable_thinking: false}\n")["model"][
        "chat_template_kwargs"
    ] == {"enable_thinking": False}
    told = refuse("train_cfgs: {hub_token: Xk29sLpQ88vv}\nhub_token: abc\n", "dpo.yaml")
    assert "hub_token: is set again with another value" in told
    assert "Xk29" not in told


def test_a_task_on_the_command_line_counts(folder: Path) -> None:
    recipe = convert("config.yaml", TRL.replace("loss_type: [ipo]\n", "desirable_weight: 1.5\n"), "kto")
    assert recipe["task"] == "kto"
    assert recipe["options"] == {"beta": 0.2, "desirable_weight": 1.5}
    assert convert("config.yaml", "base_model: model\nrl: orpo\norpo_alpha: 0.3\nlearning_rate: 1e-5\n")["options"] == {
        "loss_type": "orpo",
        "beta": 0.3,
    }


@pytest.mark.parametrize(
    ("value", "block", "preset"),
    [
        ("examples/deepspeed/ds_z2_offload_config.json", None, "zero2_offload"),
        ("zero3", None, "zero3"),
        ("ds.json", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "zero3_offload"),
        ("ds.json", {"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}, "zero1"),
        ("ds.json", None, None),
    ],
)
def test_a_deepspeed_json_becomes_the_preset_of_its_stage(
    value: str, block: dict[str, Any] | None, preset: str | None, folder: Path
) -> None:
    if block is not None:
        Path(value).write_text(json.dumps(block))
    assert convert("theirs.yaml", f"stage: sft\ndeepspeed: {value}\n").get("ds_config") == preset


def test_an_image_model_is_trained_in_its_parts(folder: Path) -> None:
    text = "stage: sft\nmodel_name_or_path: model\nimage_max_pixels: 262144\nfinetuning_type: full\n"
    recipe = convert("theirs.yaml", text + "freeze_multi_modal_projector: false\n")
    assert recipe["task"] == "vlm"
    assert recipe["model"]["freeze"] == ["vision"]


def test_an_existing_file_is_not_overwritten(folder: Path) -> None:
    Path("theirs.yaml").write_text(LLAMA_FACTORY)
    Path("recipe.yaml").write_text("mine")
    result = invoke("init", "--from", "theirs.yaml", "--to", "recipe.yaml")
    assert (result.exit_code, Path("recipe.yaml").read_text()) == (2, "mine")
    assert "already exists" in result.stderr
    assert "no TASK was given" in invoke("init").stderr


def test_a_script_is_read_and_not_run(folder: Path) -> None:
    text = "touch trap\naccelerate launch --num_processes 8 train/dpo.py --model_name_or_path model --dataset_name pairs.jsonl \\\n --beta=.3 --bf16 --run_name $NAME"
    recipe = convert("run.sh", text)
    assert (recipe["task"], recipe["options"], recipe["precision"]) == ("dpo", {"beta": 0.3}, "bf16")
    assert "run_name: its value is the shell's; write it in" in invoke("init", "--from", "run.sh").stdout
    assert not Path("trap").exists()
    assert f"is a script; `dstrain init --from {folder}/run.sh" in invoke("train", "run.sh").stderr
    Path("below.yaml").write_text("model_name_or_path: model\nmax_length: 32\nlearning_rate: 1e-5\n")
    recipe = convert("run.sh", "trl sft --config below.yaml --learning_rate 2e-5 # fast")
    assert (recipe["optim"]["lr"], recipe["data"]["max_length"]) == (2e-5, 32)
    text = "torchrun --nproc_per_node 8 swift/cli/rlhf.py --rlhf_type kto --model model --dataset pairs.jsonl"
    assert convert("run.sh", text)["task"] == "kto"
    assert "a configuration of ms-swift" in invoke("init", "--from", "run.sh").stderr
    assert "run.sh:2: names nowhere.yaml, which is not here" in refuse("\ntrl sft --config nowhere.yaml", "run.sh")
    assert "run.sh:1: the command cannot be read" in refuse("swift sft --model 'x", "run.sh")
    assert "has no command that is known (`swift sft`, `llamafactory-cli train`" in refuse(
        "swift infer --model x", "run.sh"
    )


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--learning-rate 3e-5", ("optim", "lr"), 3e-5),
        ("--no_gradient_checkpointing", ("model", "gradient_checkpointing"), False),
        ("--no-gradient-checkpointing", ("model", "gradient_checkpointing"), False),
        ("--accelerate_config zero3", ("ds_config",), "zero3"),
        ("--accelerate_config launch.yaml", ("ds_config",), "zero3_offload"),
        ("--accelerate_config launch.yaml", ("precision",), "bf16"),
    ],
)
def test_options_are_read_as_the_trainer_reads_them(words: str, key: tuple[str, ...], value: Any, folder: Path) -> None:
    zero = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    Path("launch.yaml").write_text(json.dumps({"deepspeed_config": zero, "mixed_precision": "bf16"}))
    text = f"trl sft --model_name_or_path model --dataset_name chats.jsonl {words}"
    assert lookup(convert("run.sh", text), key) == value
    result = invoke("init", "--from", "run.sh")
    assert len(differing_lines(result)) == 1
    assert "differs: assistant_only_loss (default): of records with prompt and completion" in result.stderr
    assert "  assistant_only_loss: false         # assistant_only_loss (default)" in result.stdout


@pytest.mark.parametrize(
    ("launch", "preset"),
    [
        ("accelerate launch --config_file launch.yaml", "zero3"),
        ("accelerate launch --num_processes 8 --config_file=nowhere/deepspeed_zero1.yaml", "zero1"),
        ("accelerate launch --use_deepspeed --zero_stage 2 --offload_optimizer_device cpu", "zero2_offload"),
        ("accelerate launch --config_file fsdp.yaml", None),
        ("torchrun --nproc_per_node 8", None),
    ],
)
def test_the_launchers_zero_stage_is_the_preset(launch: str, preset: str | None, folder: Path) -> None:
    Path("launch.yaml").write_text("deepspeed_config: {deepspeed_config_file: ds.json}\ndistributed_type: DEEPSPEED\n")
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {}\n")
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    recipe = convert("run.sh", f"{launch} dpo.py --model_name_or_path model --dataset_name pairs.jsonl")
    assert recipe.get("ds_config") == preset


def test_words_after_the_file_of_a_training_replace_its_values(folder: Path) -> None:
    Path("theirs.yaml").write_text(LLAMA_FACTORY)
    recipe = convert("run.sh", "llamafactory-cli train theirs.yaml learning_rate=3e-5 lora_rank=2")
    assert (recipe["optim"]["lr"], recipe["model"]["lora"]["rank"]) == (3e-5, 2)
    recipe = convert("run.sh", "accelerate launch --zero_stage 1 src/train.py theirs.yaml learning_rate=3e-5")
    assert (recipe["optim"]["lr"], recipe["ds_config"]) == (3e-5, "zero1")


def test_an_offload_that_no_preset_has_is_said(folder: Path) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    Path("theirs.yaml").write_text("stage: sft\nmodel_name_or_path: model\ndeepspeed: ds.json\n")
    said = invoke("init", "--from", "theirs.yaml").stderr
    assert "differs from the preset zero3_offload; `dstrain presets --adopt ds.json`" in said
    Path("dpo.yaml").write_text("model_name_or_path: model\naccelerate_config: launch.yaml\n")
    for config, told in (("{zero_stage: 3, offload_param_device: cpu}", 1), ("{zero_stage: 3}", 0), ("[1]", 0)):
        Path("launch.yaml").write_text(f"deepspeed_config: {config}\n")
        assert invoke("init", "--from", "dpo.yaml").stderr.count("differs from the preset zero3_offload") == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train demo-rm --learning_rate 1e-5", "here it is optim.lr: write --set optim.lr=1e-5."),
        ("train demo-rm --max-steps=2", "here it is steps: write --set steps=2."),
        ("train demo-rm --max-steps --cpu", "here it is steps: write --set steps=VALUE."),
        ("train demo-rm --optim.lr 2", "write --set optim.lr=2."),
        ("train demo-rm optim.lr=1e-5", "write --set optim.lr=1e-5"),
        ("train demo-rm --output_dir x", "here it is --run-dir"),
        ("train demo-rm --push_to_hub", "here it is `dstrain export --push-to-hub`"),
        ("merge x", "write `dstrain export RUN --to FOLDER --merge-lora`"),
        ("sft x.yaml", "write `dstrain train --task sft`"),
    ],
)
def test_a_word_of_another_trainer_on_the_command_line_is_answered(words: str, told: str) -> None:
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert told in result.stderr
