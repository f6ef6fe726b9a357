"""The keys of other trainers: each has an answer, and each answer names a key that there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from dstrain.cli import main
from dstrain.config.aliases import (
    describe_method,
    find_answer,
    find_trainer,
    find_value,
    read_aliases,
    read_table,
    read_values,
)
from dstrain.config.read import list_keys, read_recipe
from dstrain.errors import RecipeError
from dstrain.tasks import builtin_tasks, find_task, task_options

KEYS = {
    "TRL": "model_name_or_path dataset_name lora_r lora_target_modules beta loss_type precompute_ref_log_probs label_smoothing assistant_only_loss disable_dropout chat_template_path ref_model_name_or_path eos_token push_to_hub dataset_num_proc padding_free sync_ref_model use_liger_kernel activation_offloading num_generations",
    "LLaMA-Factory": "stage finetuning_type template cutoff_len do_train save_only_model image_max_pixels freeze_vision_tower freeze_multi_modal_projector freeze_language_model overwrite_cache pref_beta pref_ftx dataset_dir galore_rank ppo_epochs swanlab_project plot_loss neat_packing resize_vocab",
    "axolotl": "base_model datasets adapter sequence_len micro_batch_size num_epochs lr_scheduler val_set_size lora_r lora_target_linear evals_per_epoch saves_per_epoch special_tokens wandb_project wandb_watch tf32 rl liger_rope plugins fsdp_config flash_attention gptq sample_packing_bin_size lora_mlp_kernel qat",
    "ms-swift": "tuner_type train_type rlhf_type split_dataset_ratio attn_impl target_modules load_from_cache_file freeze_vit vit_lr agent_template quant_bits tensor_model_parallel_size recompute_granularity moe_aux_loss_coeff rollout sleep_level",
    "align-anything": "ds_cfgs scale_coeff lr_warmup_ratio adam_betas eval_interval train_datasets train_template log_type log_project load_checkpoint lambda_init use_lora critic_lr",
    "DeepSpeed": "zero_optimization optimizer scheduler gradient_clipping train_batch_size train_micro_batch_size_per_gpu",
}
"""Trainer -> some of its keys, of all their kinds."""


@pytest.mark.parametrize(
    ("trainer", "name"), [(trainer, name) for trainer, names in KEYS.items() for name in names.split()]
)
def test_a_key_of_another_trainer_is_answered(trainer: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"task: sft\n{name}: 1\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "r.yaml")
    (fault,) = caught.value.faults
    assert fault.where == f"r.yaml:2 {name}"
    assert re.match(r"here it is |not needed because |not supported \(", fault.fix), fault.fix


def test_every_argument_of_the_installed_trainer_is_answered() -> None:
    from transformers import TrainingArguments

    names = {one.name for one in dataclasses.fields(TrainingArguments)} - {"seed"}
    assert not {name for name in names if find_answer((name,)) is None}


def test_an_answer_names_a_key_or_option_that_there_is() -> None:
    known = {*list_keys(), "model.lora", "log.wandb"}
    blocks = ("model.lora.", "log.wandb.", "eval.generate.", "optim.groups", "launch.", "model.processor.")
    options = {option.name for task in builtin_tasks() for option in task_options(find_task(task))}
    for name, answer in read_aliases().items():
        if answer.kind != "keys":
            continue
        assert "  " not in answer.text
        for option in re.findall(r"options\.(\w+)", answer.text):
            assert option in options, name
        for key in re.findall(r"(?<![\w.])(?:model|data|optim|batch|eval|save|log)\.[\w.]*\w", answer.text):
            assert key in known or key.startswith(blocks), name
        commands = [main, *main.commands.values()]
        spelled = {name for command in commands for option in command.params for name in option.opts}
        assert {*re.findall(r"(?<!-)--[\w-]+", answer.text)} <= spelled, name


def test_no_name_has_two_answers() -> None:
    text = (Path(__file__).parents[3] / "dstrain/config/aliases.yaml").read_text().partition("\nvalues:")[0]
    rows = re.findall(r"^ {4}\[([^]]*)\]", text, flags=re.M)
    names = [name.strip() for row in rows for name in row.split(",")]
    names += re.findall(
        r"^ {4}([\w.]+): \[", text.partition("\nby value:")[2].partition("\nnot supported:")[0], flags=re.M
    )
    assert len(names) > 1000
    assert sorted(names) == sorted({*names})
    assert {*names} == {*read_aliases()}


def test_keys_in_blocks_have_their_own_answer() -> None:
    assert str(find_answer(("fsdp_config", "offload_params"))).startswith("not needed because DeepSpeed's ZeRO shards")
    assert str(find_answer(("train_cfgs", "learning_rate"))) == "here it is optim.lr"
    assert str(find_answer(("datasets", 0, "ds_type"))).startswith("not needed because the records are read by their")
    assert str(find_answer(("trl", "beta"))).startswith("not supported (no reinforcement learning")
    assert find_answer(("frobnicate",)) is None


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("disable_shuffling", False, True),
        ("average_tokens_across_devices", True, False),
        ("datasets.roles_to_train", ["assistant"], ["assistant", "user"]),
        ("datasets.roles_to_train", ["gpt"], []),
        ("datasets.train_on_eos", "turn", "all"),
        ("datasets.message_field_training", "train", "learn"),
        ("lora_bias", "none", "all"),
    ],
)
def test_the_value_of_a_key_decides_its_answer(name: str, same: object, other: object) -> None:
    answer = find_answer((name,))
    assert answer is not None
    assert answer.for_value(same).kind == "not needed because"
    assert answer.for_value(other).kind == "not supported"
    assert re.match(r"only `.*` is supported \(", str(answer))


def test_known_keys_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: sft\nqqqq: 1\nzzzz: 2\noptim: {xxxx: 1, jjjj: 2}\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "r.yaml")
    fixes = [fault.fix.partition(":")[0] for fault in caught.value.faults]
    assert fixes == ["known here", "correct or remove it", "known here", "correct or remove it"]
    assert "r.yaml:3 zzzz: no such key; correct or remove it" in str(caught.value).splitlines()


def test_a_key_in_a_block_of_a_recipe_is_not_taken_for_another_trainers(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: sft\nmodel: {mode: x, metric: 1}\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "r.yaml")
    assert "not supported" not in str(caught.value)
    assert "init --from" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("model: {lora: true}", "write `lora: {rank: 16}`"),
        ("model: {lora: 8}", "write `lora: {rank: 8}`"),
        ("model: {lora: false}", "write `lora: {rank: 16}`, or leave it out"),
        ("model: {lora: {r: 8}}", "here it is model.lora.rank"),
        ("model: org/name", "write `model: {path: org/name}`"),
        ("model: {quantize: 4bit}", "here it is nf4"),
        ("log: {wandb: true}", "write `wandb: {project: NAME}`"),
        ("optim: {name: adamw_torch}", "here it is adamw"),
        ("optim: adamw_torch", "write `optim: {name: adamw}`"),
        ("optim: {schedule: constant_with_warmup}", "here it is constant"),
    ],
)
def test_a_value_of_another_trainer_is_answered(text: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"task: sft\n{text}\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "r.yaml")
    assert [fault.fix for fault in caught.value.faults] == [fix]


def test_a_value_here_is_one_of_the_schema(tmp_path: Path) -> None:
    for key, values in read_values().items():
        for ours in {*map(str, values.values())} if key != "task" else ():
            lora = ["model.lora={}"] if key == "model.quantize" else []
            project = ["log.wandb.project=x"] if key.startswith("log.wandb") else []
            read_recipe(None, ["task=sft", *lora, *project, f"{key}={ours}"])
    assert {find_value("task", name) for name in read_values()["task"]} <= {*builtin_tasks()}


def test_methods_are_named_as_here() -> None:
    assert describe_method("orpo") == "write dpo, with options.loss_type: orpo"
    assert describe_method("pt") == "here it is sft"
    assert str(describe_method("grpo")).startswith("not supported (")
    assert describe_method("dop") is None


def test_a_trainer_is_known_by_its_keys() -> None:
    assert find_trainer({"base_model": "x"}) == "axolotl"
    assert find_trainer({"model_name_or_path": "x", "template": "y"}) == "LLaMA-Factory"
    assert find_trainer({"model": "x"}) is None
    assert set(KEYS) - {"DeepSpeed"} == set(read_table()["trainers"])
