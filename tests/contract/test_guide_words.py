"""Words of the guides and of hand-written loops are answered with the key here and its value."""

from __future__ import annotations

import copy
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dstrain.cli import main
from dstrain.config import RunConfig, read_recipe
from dstrain.config.aliases import RECIPES_DIR
from dstrain.config.read import list_keys
from dstrain.errors import RecipeError
from dstrain.tasks import TaskOptions, builtin_tasks, find_task, make_task, task_options
from tests.tiny import tiny_recipe
from tests.vocabulary import write_recipe

OPTIONS = {
    "--batch_size 8": "batch.total for all processes together, or batch.micro for each of them (with batch.accumulate): "
    "write --set batch.total=8 or --set batch.micro=8.",
    "--mask_ratio 0.15": "options.mask_ratio, of protein and temporal: write --set options.mask_ratio=0.15.",
    "--task protein --mask_ratio 0.15": "here it is options.mask_ratio: write --set options.mask_ratio=0.15.",
    "--hidden_dim 128": "options.hidden_dim, of protein: write --set options.hidden_dim=128.",
    "--num_encoder_layers 3": "write --set options.encoder_layers=3.",
    "--num_decoder_layers=3": "write --set options.decoder_layers=3.",
    "--cpu_offload": "write --ds-config zero2_offload.",
    "--optimizer_type 8bit-adam": "write --set optim.name=adamw_8bit.",
    "--use_data_augmentation": "options.crop, rotate, noise and color of docqa, such as 0.02, 2, 5 and 0.1",
    "--use_optimized_loss": "write --set options.label_smoothing=0.1 --set options.focal_gamma=2.",
    "--documents pdfs": "the `media_dir` in data.train: {path, media_dir}",
    "--train_questions q.jsonl": "write --set data.train=q.jsonl.",
    "--valid_questions v.jsonl": "write --set data.eval=v.jsonl.",
    "--pdb_path structures": "write --set data.train=structures.",
    "--save_dir out": "write --run-dir out.",
    "--cache_dir c": "the environment variable DSTRAIN_CACHE",
    "--nproc_per_node=4": "write --num-gpus 4.",
    "--nnodes 2": "write --num-nodes 2.",
    "--config train.yaml": "RECIPE: `dstrain train FILE`",
    "--use_peft": "write --set 'model.lora={}'.",
    "--stage pretrain": "of a vision-language model it is a recipe, vlm-pretrain or vlm-sft, and of temporal options.stage",
    "--fp16": "write --set precision=fp16.",
    "--gradient_accumulation_steps 4": "write --set batch.accumulate=4.",
    "--num_samples 100": "write --set options.synthetic.num_samples=100.",
    "--logging_steps 1": "write --set log.every=1.",
    "--task helpful": "here it is the recipe rm-helpful (`dstrain train rm-helpful`)",
    "--task harmless": "here it is the recipe rm-harmless",
    "--task pretrain": "here it is sft, or of images the recipe vlm-pretrain",
    "optim.lr=1e-4": "write --set optim.lr=1e-4",
}
"""Words behind `dstrain train RECIPE` -> part of the answer."""
KEYS = {
    "batch_size: 8": "batch.total for all processes together, or batch.micro for each of them (with batch.accumulate)",
    "data: {batch_size: 8}": "batch.total for all processes together, or batch.micro for each of them",
    "accumulation_steps: 4": "here it is batch.accumulate",
    "use_mixed_precision: true": "here it is precision: auto",
    "gradient_clip: 1.0": "here it is optim.clip",
    "use_ddp: true": "not needed because DeepSpeed's ZeRO shards and the launcher starts the processes",
    "find_unused_parameters: false": "not needed because DeepSpeed's ZeRO shards",
    "set_to_none: true": "not needed because DeepSpeed's ZeRO shards",
    "pin_memory: true": "here it is data.pin",
    "data: {pin_memory: true}": "here it is data.pin",
    "prefetch_factor: 2": "here it is data.prefetch",
    "num_samples: 100": "here it is options.synthetic.num_samples, of temporal",
    "mask_ratio: 0.15": "here it is options.mask_ratio, of protein and temporal",
    "training: {batch_size: 8}": "batch.total for all processes together",
    "training: {gradient_clip: 1}": "here it is optim.clip",
    "optimizer_type: 8bit-adam": "here it is optim.name: adamw_8bit",
    "use_peft: true": "here it is model.lora: {}",
    "optim: {betas: '0.9,0.95'}": "must be a list, got '0.9,0.95'; write [0.9,0.95]",
    "model: {lora: {targets: 'q_proj, v_proj'}}": "write a list: [q_proj, v_proj]",
}
"""Line of a recipe -> part of the fault."""


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("words", OPTIONS)
def test_an_option_of_a_guide_is_answered_with_key_and_value(words: str) -> None:
    result = invoke("train", "demo-rm", *shlex.split(words))
    assert result.exit_code == 2
    assert OPTIONS[words] in result.stderr


@pytest.mark.parametrize("words", [words for words in OPTIONS if "--set" in OPTIONS[words]])
def test_an_option_that_is_written_is_read(words: str) -> None:
    written = re.findall(r"--set (\S+?)\.?(?=\s|$)", OPTIONS[words].partition("write ")[2])
    for text in (shlex.split(text)[0] for text in written):
        key = text.partition("=")[0]
        if key.startswith("options."):
            owners = [task for task in builtin_tasks() if TaskOptions().find_type(task, key.removeprefix("options."))]
            assert owners, text
        assert read_recipe(None, ["task=sft", text]).config


@pytest.mark.parametrize("line", KEYS)
def test_a_key_of_a_guide_is_answered(line: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"task: sft\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "r.yaml", options=TaskOptions())
    assert KEYS[line] in str(caught.value)


def test_the_options_of_the_recipes_task_come_first(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: temporal\nstage: masked\nlabels: [a]\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "r.yaml", options=TaskOptions())
    assert [fault.fix for fault in caught.value.faults] == ["here it is options.stage", "here it is options.labels"]


@pytest.mark.slow
@pytest.mark.parametrize("task", builtin_tasks())
def test_every_option_of_a_task_is_known_by_its_name(task: str) -> None:
    names = [option.name for option in task_options(find_task(task))]
    assert [TaskOptions().find_place(task, name) for name in names] == [f"options.{name}" for name in names]
    assert all(TaskOptions().find_place("", name) for name in names)


@pytest.mark.parametrize(
    ("task", "metric", "ours"),
    [
        ("docqa", "eval_accuracy", "exact_match"),
        ("docqa", "accuracy", "exact_match"),
        ("sft", "eval_accuracy", "token_accuracy"),
        ("rm", "eval_accuracy", "accuracy"),
        ("temporal", "accuracy", "pattern_accuracy"),
        ("protein", "eval_loss", "loss"),
    ],
)
def test_a_metric_of_another_trainer_is_answered(task: str, metric: str, ours: str, tmp_path: Path) -> None:
    values = tiny_recipe(task, tmp_path)
    write_recipe(tmp_path, {**values, "eval": {"metric": metric}})
    with pytest.raises(Exception, match=f"'{metric}' is not a metric of task {task}; here it is {ours}$"):
        make_task(read_recipe(tmp_path / "recipe.yaml").config)


def test_text_is_taken_as_text_where_a_key_is_text() -> None:
    def read(recipe: str, *overrides: str) -> RunConfig:
        return read_recipe(RECIPES_DIR / f"{recipe}.yaml", overrides, options=TaskOptions()).config

    assert read("demo-rm", "launch.slurm.time=24:00:00").launch.slurm.time == "24:00:00"
    assert read("demo-rm", 'launch.slurm.time="24:00:00"').launch.slurm.time == "24:00:00"
    assert read("demo-rm", "launch.slurm.time=null").launch.slurm.time is None
    assert read("demo-rm", "model.chat_template={{ x }}").model.chat_template == "{{ x }}"
    assert read("docqa", "options.prompt_template={question}").options["prompt_template"] == "{question}"
    with pytest.raises(RecipeError, match=r"steps: must be a whole number, got '24:00:00'"):
        read("demo-rm", "steps=24:00:00")


@pytest.mark.parametrize("recipe", ["demo-rm", "docqa", "protein"])
def test_null_removes_a_key_that_cannot_be_null(recipe: str) -> None:
    path = RECIPES_DIR / f"{recipe}.yaml"
    values = yaml.safe_load(path.read_text())
    keys = [key for key in list_keys() if key.split(".")[0] in values and key not in ("task", "options")]
    for key in keys:
        block, _, name = key.partition(".")
        if name and not (isinstance(values[block], dict) and name in values[block]):
            continue
        removed = copy.deepcopy(values)
        del (removed[block] if name else removed)[name or block]
        config = read_recipe(path, [f"{key}=null"], options=TaskOptions()).config
        expected = RunConfig.model_validate(removed)
        value = getattr(getattr(config, block), name) if name else getattr(config, block)
        assert value is None or getattr(config, block) == getattr(expected, block), key


def test_null_in_a_file_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: sft\nseed: null\n")
    with pytest.raises(
        RecipeError, match=r"r\.yaml:2 seed: must be a whole number, got None; give it a value, or remove it"
    ):
        read_recipe(tmp_path / "r.yaml")


def test_fp16_can_be_looked_at_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    shown = invoke("train", "demo-rm", "--ds-config", "zero2_fp16", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "warning: fp16 needs a GPU" in shown.stderr
    assert '"fp16"' in shown.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model.lora.targets=q_proj,v_proj", "is one text, 'q_proj,v_proj', which is the name of no module"),
        ("model.lora.targets=[nowhere]", "['nowhere'] match no linear layer of the model; known here: down_proj"),
        (
            "optim.groups={a: {lr: 1}}",
            "optim.groups 'a': matches no parameter; names here begin with model.embed_tokens",
        ),
        ("model.freeze=[nowhere]", "model.freeze 'nowhere': matches no parameter"),
    ],
)
def test_a_dry_run_refuses_names_that_the_model_lacks(
    text: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    result = invoke("train", "demo-rm", "--dry-run", "--set", text)
    assert result.exit_code == 2, result.output
    assert told in result.stderr


def test_groups_of_parameters_that_there_are_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    for text in ("optim.groups={model.layers: {lr: 1.0e-5}, score: {lr: 1.0e-4}}", "model.freeze=[model.embed_tokens]"):
        assert invoke("train", "demo-rm", "--dry-run", "--set", text).exit_code == 0, text
    words = ("--set", "model.lora={targets: [q_proj]}", "--set", "optim.groups={'*lora_B.default*': {lr: 1.0e-5}}")
    assert invoke("train", "demo-rm", "--dry-run", *words).exit_code == 0


def test_files_in_one_text_are_written_as_a_list() -> None:
    result = invoke("train", "demo-rm", "--dry-run", "--set", "data.train=a.jsonl,b.jsonl")
    assert "there is no such file; write several as a list: [a.jsonl,b.jsonl]" in result.stderr
    assert "is a value of a key; write --set optim.lr=1e-4" in invoke("train", "optim.lr=1e-4").stderr


@pytest.mark.parametrize(
    "words",
    [
        ("data", "check", "NAME", "--task", "rm"),
        ("data", "show", "NAME", "--task", "rm"),
        ("train", "demo-rm", "--set", "data.train=NAME", "--dry-run"),
        ("train", "NAME"),
        ("train", "demo-rm", "--run-dir", "NAME", "--dry-run"),
        ("evaluate", "NAME", "--data", "x.jsonl"),
        ("init", "--from", "NAME"),
        ("prepare", "demo-rm", "--set", "model.path=NAME"),
        ("export", "NAME", "--to", "out"),
    ],
)
def test_a_path_that_is_not_utf8_is_refused_with_its_name(words: tuple[str, ...], tmp_path: Path) -> None:
    name = os.fsdecode(b"f\xfcr.jsonl")
    result = invoke(*[word.replace("NAME", name) for word in words])
    assert result.exit_code == 2
    assert "f\\xfcr.jsonl: is not valid UTF-8, which recipes, logs and trackers need; rename the file" in result.stderr
