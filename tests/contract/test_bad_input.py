"""Bad input: one message that names the place and the mend, exit 2, nothing started, nothing written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

from dstrain.batch import Progress
from dstrain.cli import main
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import UsageError
from dstrain.launch.topology import Worker
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.input_digests import dump_training_recipe
from dstrain.training.run_dir import write_run_config
from dstrain.training.start import ResumeOptions
from dstrain.training.state.manifest import write_hashed_file
from tests.contract.wrong_inputs import ALL, PLAIN, RANK
from tests.tiny import tiny_recipe

RECIPE = "recipe.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe in it; launching fails the test."""
    values = tiny_recipe("rm", tmp_path)
    (tmp_path / RECIPE).write_text(yaml.safe_dump(values, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    for name in (*RANK, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DSTRAIN_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def never(*arguments: Any) -> int:
        raise AssertionError("something was launched")

    monkeypatch.setattr("dstrain.commands.train.supervise", never)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["train", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


def recipe(text: str) -> Callable[[Path], list[str]]:
    """A recipe of its own."""

    def write(folder: Path) -> list[str]:
        (folder / "bad.yaml").write_text(text)
        return ["bad.yaml"]

    return write


def sets(*pairs: str) -> Callable[[Path], list[str]]:
    """The good recipe with --set."""
    return lambda folder: [RECIPE, *(word for pair in pairs for word in ("--set", pair))]


def preset(block: Any, *more: str) -> Callable[[Path], list[str]]:
    """The good recipe with a JSON of its own."""

    def write(folder: Path) -> list[str]:
        (folder / "ds.json").write_text(block if isinstance(block, str) else json.dumps(block))
        return [RECIPE, "--ds-config", "ds.json", *more]

    return write


def task(text: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "own.py").write_text(text)
        return [RECIPE, "--task", "./own.py"]

    return write


def unreadable(folder: Path) -> list[str]:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (folder / "bad.yaml").write_text("task: rm")
    (folder / "bad.yaml").chmod(0)
    return ["bad.yaml"]


def beside_tokenizer(folder: Path) -> list[str]:
    (folder / "mine/tokenizer").mkdir(parents=True)
    (folder / "mine/tokenizer/vocab.json").write_text("{}")
    return [RECIPE, "--run-dir", "mine"]


def beside_recipe(folder: Path) -> list[str]:
    (folder / "mine").mkdir()
    (folder / "mine" / RECIPE).write_text((folder / RECIPE).read_text())
    return [f"mine/{RECIPE}", "--set", "data.train=train.jsonl", "--run-dir", "mine"]


TASK = "from dataclasses import dataclass\nfrom dstrain.tasks import Task\n"
BODY = "    def examples(self, split): ...\n    def collate(self, examples): ...\n    def build_model(self): ...\n    def loss(self, model, batch): ...\n"

# What is wrong: how it is written, and what the message must say.
TABLE: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "a key misspelt": (sets("optim.lrr=1"), ["--set optim.lrr", "no such key", "did you mean 'lr'?"]),
    "a key misspelt in a file": (recipe("task: rm\noptim:\n  warmupp: 3\n"), ["bad.yaml:3 optim.warmupp", "did you mean 'warmup'?"]),
    "a key at the wrong level": (sets("betas=1"), ["did you mean 'optim.betas'?"]),
    "HF's batch size": (sets("per_device_train_batch_size=1"), ["here it is batch.micro"]),
    "TRL's packing": (sets("data.packing=true"), ["--set data.packing: no such key", "here it is batch.packing"]),
    "HF's output folder": (sets("output_dir=x"), ["here it is --run-dir"]),
    "HF's best model": (sets("load_best_model_at_end=true"), ["`dstrain export --step best`"]),
    "TRL's length": (sets("max_seq_length=1"), ["here it is data.max_length"]),
    "LLaMA-Factory's length": (sets("cutoff_len=1"), ["here it is data.max_length"]),
    "LLaMA-Factory's model": (sets("model_name_or_path=x"), ["here it is model.path"]),
    "YAML that does not parse": (recipe("task: rm\noptim: {lr: 1\nsteps: 3\n"), ["bad.yaml:3", "check the indentation"]),
    "a tab": (recipe("task: rm\noptim:\n\tlr: 1\n"), ["bad.yaml:3: a tab, which YAML does not accept", "use spaces"]),
    "a number of base 60": (recipe("task: rm\nsteps: 1:30\n"), ["bad.yaml:2 steps: must be a whole number, got '1:30'"]),
    "a number of base 60 in a block": (sets("data.train=[{path: train.jsonl, weight: 1:30}]"), ["--set data.train.0.weight: must be a number, got '1:30'"]),
    "a key twice in a block": (sets("optim={lr: 1, lr: 2}"), ["--set lr: is set twice", "keep one"]),
    "a tag whose value does not fit": (recipe("task: rm\nseed: !!timestamp x\n"), ["bad.yaml:2: a tag (`!!name`) does not fit its value"]),
    "a key twice": (recipe("task: rm\nseed: 1\nseed: 2\n"), ["bad.yaml:3 seed: is set twice", "keep one"]),
    "a character that no text has": (recipe("task: rm\nseed: \x01\n"), ["bad.yaml:2", "does not allow the character '\\x01'", "remove it"]),
    "aliases of aliases": (recipe("task: rm\noptions:\n  a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 9))), ["bad.yaml", "more than 10000 values", "write fewer"]),
    "text of two bytes a letter": (lambda folder: [(folder / "bad.yaml").write_text("task: rm", "utf-16") and "bad.yaml"], ["bad.yaml: is UTF-16 (byte order mark); save it as UTF-8"]),
    "a list": (recipe("- task\n- rm\n"), ["is a list", "a recipe is a mapping"]),
    "a word": (recipe("rm"), ["is a str", "a recipe is a mapping"]),
    "an alias inside itself": (recipe("task: rm\noptions: &a {x: *a}\n"), ["bad.yaml", "an alias (*) inside the block it names"]),
    "a thousand brackets": (recipe("task: rm\noptions: " + "[" * 3000 + "]" * 3000), ["bad.yaml", "nested too deeply"]),
    "a date that is none": (recipe("task: rm\nseed: 2020-13-45\n"), ["bad.yaml", "month must be in", "quote it"]),
    "two documents": (recipe("task: rm\n---\ntask: rm\n"), ["bad.yaml:2: a second YAML document begins", "remove the `---`"]),
    "bytes in YAML": (recipe("task: rm\noptions:\n  a: !!binary gIGC\n"), ["bad.yaml:3: a tag (`!name`), which is not accepted", "write the plain value"]),
    "a pattern without quotes": (recipe("task: rm\ndata:\n  train: *.jsonl\n"), ["bad.yaml:3: a value begins with `*` or `&`; put it in quotes"]),
    "Python in YAML": (recipe("task: !!python/object:os.system x\n"), ["bad.yaml:1: a tag (`!name`), which is not accepted", "write the plain value"]),
    "a deep key misspelt in a file": (recipe("task: rm\noptim:\n  groups:\n    head: {lrr: 1}\n"), ["bad.yaml:4 optim.groups.head.lrr", "did you mean 'lr'?"]),
    "a key misspelt in a list": (recipe("task: rm\ndata:\n  train:\n    - {path: x, wieght: 2}\n"), ["bad.yaml:4 data.train.0.wieght", "did you mean 'weight'?"]),
    "a key misspelt in a --set block": (sets("data.train={path: train.jsonl, wieght: 2}"), ["--set data.train.wieght", "did you mean 'weight'?"]),
    "a key misspelt in a choice": (sets("model.tokenizer={vocab_sizee: 300}"), ["--set model.tokenizer.vocab_sizee", "did you mean 'vocab_size'?"]),
    "a number for a block": (sets("optim=5"), ["--set optim", "a block of keys"]),
    "one beta": (sets("optim.betas=[0.9]"), ["optim.betas", "needs at least 2 values"]),
    "true for a number": (sets("steps=true"), ["--set steps: must be a number, got True"]),
    "a word for a rate": (sets("optim.lr=yes"), ["--set optim.lr: must be a number, got 'yes'"]),
    "true for a number in a list": (sets("data.train=[{path: train.jsonl, weight: true}]"), ["data.train.0.weight: must be a number, got True"]),
    "true for a number of the task": (sets("options.center_rewards_coefficient=true"), ["options.center_rewards_coefficient", "should be a number"]),
    "true for a column": (sets("data.columns={true: chosen}"), ["data.columns", "is not text", "quotation marks"]),
    "an endless timeout": (sets("timeout_minutes=1e99"), ["timeout_minutes", "less than or equal to 1000000"]),
    "rates on a rate of 0": (sets("optim.lr=0", "optim.groups={score: {lr: 1}}"), ["--set optim.lr", "multiples of it", "model.freeze"]),
    "a config whose kind is a number": (sets("model.config.model_type=5"), ["model.config", "has no model_type"]),
    "an empty file": (recipe(""), ["task", "is missing", "`dstrain tasks`"]),
    "no text": (lambda folder: [(folder / "bad.yaml").write_bytes(b"a: \xff") and "bad.yaml"], ["not valid UTF-8 (byte 3); re-save the file as UTF-8"]),
    "a folder for a recipe": (lambda folder: ["."], ["RECIPE .: is a folder", "give the YAML file in it"]),
    "a recipe nobody may read": (unreadable, ["cannot be read (Permission denied)", "permissions"]),
    "no such recipe": (lambda folder: ["nowhere.yaml"], ["nowhere.yaml", "there is no such file", "check the path"]),
    "a packaged name misspelt": (lambda folder: ["demo-rmm"], ["did you mean 'demo-rm'?"]),
    "a word for a number": (sets("optim.lr=fast"), ["--set optim.lr: must be a number, got 'fast'"]),
    "a list for a number": (sets("eval.every=[1]"), ["--set eval.every: must be a whole number or 'epoch', got [1]"]),
    "a negative clip": (sets("optim.clip=-1"), ["optim.clip", "greater than or equal to 0"]),
    "a beta of 2": (sets("optim.betas=[0.9,2]"), ["optim.betas", "less than 1"]),
    "infinity": (sets("optim.lr=.inf"), ["optim.lr", "finite number"]),
    "no number": (sets("optim.lr=.nan"), ["optim.lr", "finite number"]),
    "a batch of 0": (sets("batch.micro=0"), ["batch.micro", "greater than or equal to 1"]),
    "an unknown optimizer": (sets("optim.name=adamm"), ["--set optim.name", "did you mean 'adamw'?"]),
    "an unknown precision": (sets("precision=bf8"), ["--set precision", "'bf16' or 'fp16'"]),
    "a second beta below 0": (sets("optim.betas=[0.9,-0.1]"), ["--set optim.betas.1", "greater than or equal to 0", "raise it"]),
    "three betas": (sets("optim.betas=[0.9,0.99,0.999]"), ["--set optim.betas", "at most 2 items"]),
    "a timeout of nothing": (sets("timeout_minutes=1e-9"), ["--set timeout_minutes", "greater than or equal to 0.1", "raise it"]),
    "a variable with a blank": (sets("launch.env=['A B']"), ["--set launch.env.0", "name of an environment variable, or NAME=value"]),
    "a password in a URL in the recipe": (sets("launch.env=['HTTPS_PROXY=http://me:abc123@proxy:1']"), ["--set launch.env.0", "is 'HTTPS_PROXY=...', but", "a URL with a password", "write the name alone, and set the variable where you launch"]),
    "a secret in the recipe": (sets("launch.env=[WANDB_API_KEY=abc123]"), ["--set launch.env.0", "is 'WANDB_API_KEY=...', but", "write the name alone, and set the variable where you launch"]),
    "a host given up at once": (sets("launch.heartbeat_timeout_seconds=1"), ["--set launch.heartbeat_timeout_seconds", "greater than or equal to 3", "raise it"]),
    "a grace before the signal": (sets("launch.grace_seconds=-1"), ["--set launch.grace_seconds", "greater than or equal to 0"]),
    "a dropout of 2": (sets("model.lora={dropout: 2}"), ["--set model.lora.dropout", "less than 1", "lower it"]),
    "adapters that are scaled away": (sets("model.lora={alpha: 0}"), ["--set model.lora.alpha", "greater than 0"]),
    "one token": (sets("data.max_length=1"), ["--set data.max_length", "greater than or equal to 2"]),
    "threads without end": (sets("data.workers=100000"), ["--set data.workers", "less than or equal to 1024", "lower it"]),
    "steps without end": (sets("steps=99999999999"), ["--set steps", "less than 2147483648"]),
    "all data held out": (sets("data.eval=null", "data.eval_fraction=1"), ["--set data.eval_fraction", "less than 1"]),
    "a vocabulary of nine": (sets("model.tokenizer={vocab_size: 9}"), ["--set model.tokenizer.vocab_size: is 9", "at least 258 entries", "raise it"]),
    "a rate of a group that is a word": (recipe("task: rm\noptim:\n  groups:\n    head:\n      lr: fast\n"), ["bad.yaml:5 optim.groups.head.lr: must be a number, got 'fast'"]),
    "a word for lines of shell": (sets("launch.slurm.setup=module"), ["--set launch.slurm.setup: must be a list, got"]),
    "a word for parts to freeze": (sets("model.freeze=visoin"), ["--set model.freeze: must be a list, got"]),
    "a list for columns": (sets("data.columns=[a]"), ["--set data.columns", "a block of keys"]),
    "a number for a column's name": (sets("data.columns={a: 3}"), ["--set data.columns.a: must be text, got 3"]),
    "a list for options": (sets("options=[1]"), ["--set options", "a block of keys"]),
    "a list for a metric": (sets("eval.metric=[loss]"), ["--set eval.metric: '[loss]' is not a metric of task rm; did you mean 'loss'?"]),
    "an unknown schedule": (sets("optim.schedule=cosinus"), ["optim.schedule", "'cosine'"]),
    "steps and epochs": (recipe("task: rm\nsteps: 3\nepochs: 2\n"), ["bad.yaml:3 epochs: epochs and steps are both set; remove one"]),
    "steps and epochs on the command line": (sets("epochs=2", "steps=3"), ["--set epochs: epochs and steps are both set; remove one"]),
    "two kinds of held-out data": (sets("data.eval_fraction=0.1", "data.eval=eval.jsonl"), ["--set data.eval_fraction: data.eval and data.eval_fraction are both set; remove one"]),
    "micro above total": (sets("batch.micro=8"), ["batch.micro", "above batch.total (4)"]),
    "tokens without a total": (sets("batch={tokens_per_micro: 99}"), ["batch.total: is not set, and batch.tokens_per_micro needs it"]),
    "tokens and a number of passes": (sets("batch={total: 4, accumulate: 2, tokens_per_micro: 99}"), ["batch.accumulate: is set together with batch.tokens_per_micro"]),
    "a batch that does not add up": (sets("batch.accumulate=3"), ["batch.total: is 4, but micro 2 x accumulate 3 x 1 process = 6", "remove batch.accumulate (2 would fit)"]),
    "a model twice": (sets("model.path=x", "model.config={model_type: llama}"), ["--set model.config: model.path and model.config are both set", "keep path to load weights"]),
    "a config of no kind": (sets("model.config={hidden_size: 8}"), ["model.config", "has no model_type"]),
    "a prompt above the length": (sets("data.max_prompt_length=99"), ["data.max_prompt_length", "above data.max_length (48)"]),
    "a warmup above the steps": (sets("optim.warmup=9"), ["optim.warmup", "of only 4 steps"]),
    "a base without scaling": (sets("optim.scale_lr_base=8"), ["optim.scale_lr_base", "has no effect"]),
    "a data file misspelt": (sets("data.train=trian.jsonl"), ["trian.jsonl", "there is no such file", "did you mean 'train.jsonl'?"]),
    "a file with an ending that a hub name has not": (sets("data.train=org/name.jsonl"), ["org/name.jsonl", "there is no such file", "org/name for a dataset on the hub"]),
    "a name of three parts": (sets("data.train=a/b/c"), ["data.train a/b/c", "there is no such file"]),
    "a path with a variable": (sets("data.train=$HOME/x.jsonl"), ["data.train $HOME/x.jsonl: holds a $, but dstrain replaces no variables; write the path out"]),
    "a URL of data": (sets("data.train=s3://bucket/x.jsonl"), ["data is not read from s3://; download or mount it"]),
    "a data file of a recipe that is not there": (recipe("task: rm\noptim: {lr: 1}\ndata:\n  train: [{path: x.jsonl}]\n"), ["error: bad.yaml:4 data.train x.jsonl: there is no such file"]),
    "a metric of a recipe that does not exist": (recipe("task: rm\nmodel: {path: model}\ndata: {train: train.jsonl}\neval: {metric: f1}\n"), ["error: bad.yaml:4 eval.metric: 'f1' is not a metric"]),
    "a key that a recipe leaves out": (recipe("task: rm\nmodel: {path: model}\n"), ["error: bad.yaml data.train: is not set"]),
    "a path of a file that is not there": (sets("data.eval=/nowhere/x.jsonl"), ["data.eval /nowhere/x.jsonl", "no such file in /nowhere"]),
    "a name too long for the system": (sets("data.train=" + "x" * 300), ["data.train xxx", "there is no such file"]),
    "a split of a file": (sets("data.eval={path: eval.jsonl, split: test}"), ["split: works only for Hub datasets; ", "eval.jsonl is a local file; remove it"]),
    "a configuration of a file": (sets("data.train=[{path: train.jsonl, name: main}]"), ["name: works only for Hub datasets; ", "train.jsonl is a local file"]),
    "a part of a split": (sets("data.train={path: org/name, split: 'train[:9]'}"), ["--set data.train.split", "a split is one name", "data.max_samples"]),
    "two splits in one": (recipe("task: rm\ndata:\n  train:\n    - {path: org/name, split: train+test}\n"), ["bad.yaml:4 data.train.0.split", "a split is one name"]),
    "a split that is a number": (sets("data.eval={path: org/name, split: 3}"), ["--set data.eval.split: must be text, got 3"]),
    "no configuration": (sets("data.eval={path: org/name, name: ''}"), ["--set data.eval.name", "at least 1 character"]),
    "a key of held-out data misspelt": (sets("data.eval={path: org/name, splitt: test}"), ["--set data.eval.splitt", "did you mean 'split'?"]),
    "a weight of held-out data": (sets("data.eval={path: eval.jsonl, weight: 2}"), ["--set data.eval.weight", "no such key"]),
    "held-out data without a path": (sets("data.eval={split: test}"), ["--set data.eval", "'path' is missing in it", "add what is missing"]),
    "a number for held-out data": (sets("data.eval=5"), ["--set data.eval: must be a file, a Hub dataset, or {path, split, name, columns, media_dir}, got 5"]),
    "TRL's name of a split": (sets("dataset_train_split=train"), ["here it is the `split` in data.train"]),
    "HF's name of a configuration": (sets("data.train={path: org/name, subset: main}"), ["data.train.subset", "here it is the `name`"]),
    "a blank for a data file": (recipe("task: rm\ndata:\n  train:\n"), ["bad.yaml:3 data.train: must be a file, a Hub dataset, or a list of them and of", "got None"]),
    "a number for a data file": (sets("data.train=[train.jsonl, 5]"), ["--set data.train", "a file, a Hub dataset, or a list of them"]),
    "a weight of 0": (sets("data.train=[{path: train.jsonl, weight: 0}]"), ["data.train", "greater than 0"]),
    "--set without a value": (sets("optim.lr"), ["--set optim.lr: has no value", "--set optim.lr=2e-5"]),
    "--set without a key": (sets("=1"), ["--set =1: names no key", "--set optim.lr=2e-5"]),
    "--set into a block there is not": (sets("optimm.lr=1"), ["--set optimm: no such key", "did you mean 'optim'?"]),
    "a home of nobody": (lambda folder: ["~nosuchuser/r.yaml"], ["begins with ~", "no home folder is known", "set HOME"]),
    "a home of nobody for data": (sets("data.train=~nosuchuser/x.jsonl"), ["begins with ~"]),
    "a task of a dot": (lambda folder: [RECIPE, "--task", "."], ["is not a file", "a Python file that defines a task"]),
    "--set into a number": (sets("steps.x=1"), ["steps is not a block of keys"]),
    "--set of no YAML": (sets("optim={lr"), ["the value is not valid YAML"]),
    "a task misspelt": (sets("task=rmm"), ["task 'rmm'", "did you mean 'rm'?"]),
    "a task that nobody wrote": (sets("task=alchemy"), ["task 'alchemy'", "unknown task", "known here"]),
    "a task file that is not there": (lambda folder: [RECIPE, "--task", "./nowhere.py"], ["nowhere.py", "is not a file"]),
    "a task file of no Python": (task("def ("), ["own.py", "cannot be imported (SyntaxError"]),
    "a task file that leaves": (task("import sys\nsys.exit(0)\n"), ["own.py", "cannot be imported (SystemExit"]),
    "a task file of two tasks": (
        task(TASK + f"@dataclass(frozen=True, kw_only=True)\nclass A(Task):\n{BODY}@dataclass(frozen=True, kw_only=True)\nclass B(A):\n    x: int = 1\n"),
        ["defines A, B", "one concrete subclass"],
    ),
    "a task file of no task": (task("x = 1"), ["defines none"]),
    "a task that is no dataclass": (task(TASK + f"class A(Task):\n{BODY}"), ["A is not a dataclass", "@dataclass(frozen=True, kw_only=True)"]),
    "an option misspelt": (sets("options.label_smooting=0.1"), ["options.label_smooting", "did you mean 'label_smoothing'?"]),
    "an option of the wrong kind": (sets("options.disable_dropout=maybe"), ["options.disable_dropout", "valid boolean"]),
    "an option out of range": (sets("options.label_smoothing=0.7"), ["label_smoothing is 0.7", "below 0.5"]),
    "half of the labels flipped": (sets("options.label_smoothing=0.5"), ["label_smoothing is 0.5", "below 0.5"]),
    "no number for an option": (sets("options.label_smoothing=.nan"), ["options.label_smoothing", "finite number"]),
    "a metric misspelt": (sets("eval.metric=acuracy"), ["eval.metric", "did you mean 'accuracy'?"]),
    "a preset misspelt": (sets("ds_config=zero22"), ["zero22", "zero2"]),
    "a preset misspelt as an option": (lambda folder: [RECIPE, "--ds-config", "zeroo2"], ["ds_config zeroo2", "did you mean 'zero2'?"]),
    "a preset of braces": (lambda folder: [RECIPE, "--ds-config", "{x"], ["ds_config {x", "there is no such preset"]),
    "a preset of nothing": (lambda folder: [RECIPE, "--ds-config", ""], ["there is no such preset", "zero2"]),
    "a task of nothing": (lambda folder: [RECIPE, "--task", ""], ["--task task: is missing"]),
    "a word for a count": (lambda folder: [RECIPE, "--num-gpus", "two"], ["--num-gpus", "'two' is not a valid integer"]),
    "no process": (lambda folder: [RECIPE, "--num-gpus", "0"], ["--num-gpus 0 starts no process"]),
    "a port that is none": (lambda folder: [RECIPE, "--num-gpus", "1", "--master-port", "99999"], ["--master-port 99999 is not a port"]),
    "a launcher there is not": (lambda folder: [RECIPE, "--launcher", "mpi"], ["--launcher", "'mpi' is not one of"]),
    "a key to change that is none": (lambda folder: [RECIPE, "--allow-change", "optim.lrr"], ["--allow-change optim.lrr: no such key", "did you mean 'optim.lr'?"]),
    "a key to change from elsewhere": (lambda folder: [RECIPE, "--allow-change", "zzz"], ["--allow-change zzz: no such key", "as the recipe has it"]),
    "a JSON that is not there": (sets("ds_config=./nowhere.json"), ["nowhere.json"]),
    "a JSON of no JSON": (preset("{"), ["ds.json"]),
    "a folder for a JSON": (lambda folder: [RECIPE, "--ds-config", "./"], ["ds_config", "is a folder", "name a JSON file in it"]),
    "a preset with a name too long for the system": (sets("ds_config=" + "x" * 300), ["there is no such preset"]),
    "YAML for a JSON": (lambda folder: [RECIPE, "--ds-config", str(folder / RECIPE)], ["recipe.yaml:1:1", "not valid JSON"]),
    "a JSON of nothing": (preset(""), ["ds.json:1:1", "not valid JSON"]),
    "a JSON with comments": (preset('{\n  // fast\n  "zero_optimization": {"stage": 2}\n}'), ["ds.json:2:3", "not valid JSON", "JSON allows no comments"]),
    "a JSON with a comma too many": (preset('{"zero_optimization": {"stage": 2,}}'), ["ds.json:1:", "no trailing commas"]),
    "a JSON list": (preset([{"zero_optimization": {"stage": 2}}]), ["ds.json", "a preset is a JSON object"]),
    "a key twice in a JSON": (preset('{"zero_optimization": {"stage": 2},\n "zero_optimization": {"stage": 3}}'), ["ds.json:2 zero_optimization", "is repeated"]),
    "no number in a JSON": (preset('{"gradient_predivide_factor": NaN}'), ["ds.json", "NaN is not a JSON number"]),
    "a number too large for a JSON": (preset('{"gradient_predivide_factor": 1e999}'), ["ds.json", "1e999 is not a JSON number"]),
    "a JSON of brackets": (preset('{"aio": ' + "[" * 99999), ["ds.json", "nested too deeply"]),
    "a stage in quotation marks": (preset({"zero_optimization": {"stage": "2"}}), ["zero_optimization.stage", "write one of 0, 1, 2, 3"]),
    "a word for a switch": (preset({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": "yes"}}}), ["zero_optimization.offload_param.pin_memory", "true or false"]),
    "a list for a block": (preset({"zero_optimization": [{"stage": 2}]}), ["ds.json:1 zero_optimization", "an object"]),
    "a block misspelt": (preset({"zero_optimisation": {"stage": 2}}), ["ds.json:1 zero_optimisation", "did you mean 'zero_optimization'?"]),
    "a deep key misspelt": (preset({"zero_optimization": {"stage": 2, "overlap_com": True}}), ["zero_optimization.overlap_com", "did you mean 'overlap_comm'?"]),
    "auto": (preset({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}), ['"auto"', "this JSON would be accepted", '"stage": 2']),
    "learning in a JSON": (preset({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}), ["optimizer", "belongs in the recipe (optim)"]),
    "clipping in a JSON": (preset({"gradient_clipping": 1.0}), ["gradient_clipping", "optim.clip"]),
    "offload below stage 3": (preset({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}), ["offload_param", "stage"]),
    "stage 4": (preset({"zero_optimization": {"stage": 4}}), ["zero_optimization.stage"]),
    "an nvme_path that is not there": (preset({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/proc/none"}}}), ["offload_param.nvme_path /proc/none: this folder does not exist on this machine", "create it on a local disk"]),
    "two precisions": (preset({"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}), ["fp16", "bf16"]),
    "two micros": (preset({"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"stage": 1}}), ["batch.micro", "is 2 in the recipe and 7"]),
    "a profile that ends before it begins": (sets("profile={steps: [5, 3]}"), ["profile.steps", "ends with step 3, before its first step 5", "[3, 5]"]),
    "a profile of step 0": (sets("profile={steps: [0, 3]}"), ["profile.steps", "greater than or equal to 1"]),
    "fp16 on a CPU": (sets("precision=fp16"), ["fp16 needs a GPU", "precision: bf16 or fp32"]),
    "fp16 at stage 0": (sets("precision=fp16", "ds_config=zero0"), ["stage 0", "zero1"]),
    "hosts without a file": (lambda folder: [RECIPE, "--num-nodes", "2"], ["--num-nodes", "several hosts need --hostfile"]),
    "a hostfile": (lambda folder: [RECIPE, "--hostfile", "hosts"], ["--hostfile hosts: cannot be read (No such file", "like host1 slots=8"]),
    "resume misspelt": (lambda folder: [RECIPE, "--resume", "atuo"], ["--resume atuo", "did you mean 'auto'?"]),
    "resume from nowhere": (lambda folder: [RECIPE, "--resume", "./nowhere"], ["--resume ./nowhere", "nor an existing folder", "the folder of a run or a checkpoint"]),
    "a run folder of no name": (lambda folder: [RECIPE, "--run-dir", ""], ["--run-dir: is empty", "--run-dir runs/first"]),
    "a run folder that is the working folder": (lambda folder: [RECIPE, "--run-dir", "."], ["--run-dir", "a run has a folder of its own"]),
    "a run folder that is the whole disk": (lambda folder: [RECIPE, "--run-dir", "/"], ["--run-dir /: is a folder of the system", "--run-dir runs/first"]),
    "a run folder that others share": (lambda folder: [RECIPE, "--run-dir", "/usr/../tmp/"], ["is a folder of the system"]),
    "a run folder that is home": (lambda folder: [RECIPE, "--run-dir", "~"], ["--run-dir ~: is a folder of the system"]),
    "a run folder that is the working folder's path": (lambda folder: [RECIPE, "--run-dir", str(folder)], ["is the working directory or above it"]),
    "a run folder above": (lambda folder: [RECIPE, "--run-dir", ".."], ["--run-dir ..: is the working directory or above it"]),
    "a run folder with a recipe of one's own": (beside_recipe, ["--run-dir mine: contains a recipe.yaml that is not a run's"]),
    "a run folder with a tokenizer of one's own": (beside_tokenizer, ["--run-dir mine: contains a tokenizer that is not a run's"]),
    "a run folder whose name is no text": (lambda folder: [RECIPE, "--run-dir", "r\udcff"], ["error: r\\xff: is not valid UTF-8", "rename the file or folder"]),
    "a run folder below a file, looked at only": (lambda folder: [RECIPE, "--dry-run", "--run-dir", f"{RECIPE}/run"], ["cannot be written (", "is not a folder); choose another folder"]),
    "a run folder that is a file": (lambda folder: [RECIPE, "--run-dir", RECIPE], ["--run-dir", "cannot be written", "choose another folder"]),
}  # fmt: skip


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("wrong", TABLE)
def test_bad_input_is_named_with_its_mend(wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    write, wanted = TABLE[wrong]
    words = write(folder)
    before = files_in(folder)
    code, output = run(*words)
    assert code == 2, output
    for part in wanted:
        assert part in output, output
    assert "; " in output or "Usage: " in output, output
    assert files_in(folder) == before


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_input_is_refused_with_a_sentence(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any command."""
    wrong = ALL[name]
    wrong.write_files(folder)
    for variable, value in wrong.env.items():
        monkeypatch.setenv(variable, value)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    result = CliRunner().invoke(main, wrong.words)
    said = PLAIN.sub(" ", result.output)
    assert result.exit_code == 2, said[-1000:]
    assert "Traceback" not in said
    assert "unexpected" not in said.replace("unexpected end", "")
    assert re.search(wrong.message, said), said[-1000:]
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before, "nothing was written"


def test_all_faults_are_told_at_once(folder: Path) -> None:
    code, output = run(*sets("optim.lrr=1", "seed=-1", "data.prefetch=0", "nonsense=1", "compile=true")(folder))
    assert code == 2
    for key in ("optim.lrr", "seed", "data.prefetch", "nonsense", "compile"):
        assert f"--set {key}" in output


def with_records(count: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        good = (folder / "train.jsonl").read_text().splitlines()
        good[5 : 5 + count] = ['{"chosen": "a", "rejected": "a"}'] * count
        (folder / "train.jsonl").write_text("\n".join(good))

    return write


def without_weights(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "llama", "vocab_size": 320}')


def of_pictures(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "vit"}')
    save_file({"a": torch.zeros(1)}, folder / "model/model.safetensors")


def without_heads(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    save_file({"a": torch.zeros(1)}, folder / "model/model.safetensors")


def damaged(folder: Path) -> None:
    """A clone without git lfs: the weights are a note about weights."""
    without_weights(folder)
    (folder / "model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def without_a_shard(folder: Path) -> None:
    without_weights(folder)
    save_file({"a": torch.zeros(1)}, folder / "model/model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def holds(name: str, content: str | bytes) -> Callable[[Path], None]:
    """A data file of its own."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def records(**values: Any) -> Callable[[Path], None]:
    """A data file of one record."""
    return holds("x.jsonl", json.dumps(values))


ONE, LINES = ["data.train=x.jsonl"], '{"chosen": "a", "rejected": "b"}\n{"chosen": "c", "rejected": "d"}\n'

# Found by a worker, which reads models and data, still before any process group.
WORKER_TABLE: dict[str, tuple[list[str], Callable[[Path], None] | None, str]] = {
    "a kind of model misspelt": (["model.config.model_type=lama"], None, r"transformers has no model type 'lama'.*llama"),
    "a setting of the model misspelt": (["model.config.hiden_size=8"], None, r"model\.config\.hiden_size.*did you mean 'hidden_size'"),
    "a folder that is not there": (["model.config=null", "model.path=./nowhere"], None, r"model\.path.*'\./nowhere' is not a folder"),
    "a folder without weights": (["model.config=null", "model.path=./model"], without_weights, r"model\.path.*holds no weights"),
    "weights that git left behind": (["model.config=null", "model.path=./model"], damaged, r"model/model\.safetensors is damaged.*git lfs pull"),
    "a shard that is missing": (["model.config=null", "model.path=./model"], without_a_shard, r"00002-of-00002\.safetensors is missing, but the shard index.*download it again"),
    "a model that gives no score": (["model.config=null", "model.path=./model", "model.tokenizer={vocab_size: 300}"], of_pictures, r"model: transformers has no reward model of the vit family.*use a model of another family"),
    "a folder whose config cannot be": (["model.config=null", "model.path=./model"], without_heads, r"model\.path: .* cannot be loaded \(ZeroDivisionError"),
    "a config that cannot be": (["model.config.num_attention_heads=0"], None, r"model\.config: ZeroDivisionError.*correct the value"),
    "attention that is not installed": (["model.attn_implementation=flash_attention_2"], None, r"model\.attn_implementation: flash_attention_2 needs the package flash-attn.*use sdpa"),
    "neither path nor config": (["model.config=null"], None, r"model\.path: is not set, nor is model\.config"),
    "a width the heads do not divide": (["model.config.hidden_size=31"], None, r"model\.config.*31.*is not a multiple"),
    "a width of letters": (["model.config.hidden_size=abc"], None, r"model\.config.*'hidden_size' expected int"),
    "a width below 0": (["model.config.hidden_size=-8"], None, r"model\.config: the model cannot be built.*negative dimension"),
    "an activation misspelt": (["model.config.hidden_act=siluu"], None, r"model\.config: the model cannot be built.*siluu"),
    "no vocabulary": (["model.config.vocab_size=0"], None, r"at least 258 entries, not 0"),
    "a tokenizer that is not there": (["model.tokenizer=./nowhere"], None, r"model\.tokenizer: '\./nowhere' is not a folder"),
    "a folder without tokenizer": (["model.tokenizer=."], None, r"model\.tokenizer: there is no tokenizer in"),
    "no data": (["data.train=[]"], None, r"data\.train: is not set"),
    "bad records in files of a pattern": (["data.train=x-*.jsonl"], holds("x-1.jsonl", '{"chosen": "a"}'), r"1 of 1 records.*x-1\.jsonl:1: no 'rejected'"),
    "a folder of data": (["data.train=."], None, r"is a folder; name a \.jsonl"),
    "a folder with the name of a file": (["data.train=x.jsonl"], lambda folder: (folder / "x.jsonl").mkdir(), r"x\.jsonl is a folder; name a \.jsonl"),
    "lines that are no JSON": (ONE, holds("x.jsonl", "chosen,rejected\na,b\n"), r"2 of 2 records.*x\.jsonl:1: not valid JSON: .*; fix the line"),
    "a line that is no UTF-8": (ONE, holds("x.jsonl", b'{"chosen": "\xff"}'), r"x\.jsonl:1: not valid UTF-8 .*; re-save the file as UTF-8"),
    "a line that is a list": (ONE, holds("x.jsonl", "[1]"), r"x\.jsonl:1: an array, not an object; write"),
    "a list of brackets": (["data.train=x.json"], holds("x.json", "[" * 99999), r"x\.json is not valid JSON: .*; fix the file"),
    "records of another task": (ONE, records(messages=[{"role": "user", "content": "q"}], label=True), r"x\.jsonl:1: no 'chosen' \(its keys are: label, messages\); write it, or rename a column"),
    "one answer instead of two": (ONE, records(instruction="q", output="a"), r"x\.jsonl:1: 'output' is text, not two answers; write \[chosen, rejected\]"),
    "an instruction of nothing": (ONE, records(instruction=" ", input="", chosen="a", rejected="b"), r"x\.jsonl:1: 'instruction' is empty; write one"),
    "a history that is none": (ONE, records(instruction="q", history=["a", "b"], chosen="a", rejected="b"), r"'history' is not a list of pairs; write"),
    "tools that are none": (ONE, records(prompt="q", tools={"name": "f"}, chosen="a", rejected="b"), r"'tools' is not a list of functions; write"),
    "tools without a template": (ONE, records(prompt="q", tools=[{"name": "f"}], chosen="a", rejected="b"), r"'tools' need a chat template, and the tokenizer has none; give it one"),
    "a system text without a prompt": (ONE, records(system="s", chosen="q a", rejected="q b"), r"'system' is given with texts that contain the prompt; write 'prompt'"),
    "an unknown speaker": (ONE, records(conversations=[{"from": "alien", "value": "q"}], chosen="a", rejected="b"), r"'conversations\[0\]\.from' is 'alien', an unknown role; known roles"),
    "a margin that is no number": (ONE, records(prompt="q", chosen="a", rejected="b", margin=float("nan")), r"x\.jsonl:1: 'margin' is nan, not a finite number"),
    "all data held out by rounding": (["data.eval=null", "data.eval_fraction=0.9999"], None, r"data\.eval_fraction 0\.9999: holds out all 64 records of source 1 .*; lower it"),
    "a source that is never shown": (["data.train=[{path: train.jsonl, weight: 1.0e-9}]"], None, r"weight 1e-09 would never be shown; give it more records"),
    "held-out data that is none": (["data.eval=x.jsonl"], holds("x.jsonl", '{"chosen": "a"}'), r"1 of 1 records.*x\.jsonl:1: no 'rejected'"),
    "a vocabulary too small": (["model.config.vocab_size=300", "model.tokenizer={vocab_size: 320}"], None, r"the tokenizer has 3\d\d entries, the model's vocabulary 300"),
    "a tokenizer too small": (["model.tokenizer={vocab_size: 9}"], None, r"at least 258 entries"),
    "bad records": ([], with_records(4), r"4 of 64 records \(6\.2%\).*train\.jsonl:6.*on_error: skip"),
    "one bad record that is not to be": (["data.on_error=fail"], with_records(1), r"1 of 64 records.*data\.on_error is fail"),
    "a column misspelt": (["data.columns={choosen: chosen}"], None, r"data\.columns\.choosen.*did you mean 'chosen'"),
    "a freeze that matches nothing": (["model.freeze=[visoin]"], None, r"model\.freeze 'visoin': matches no parameter"),
    "a freeze of everything": (["model.freeze=['*']"], None, r"model\.freeze: leaves no parameter to train"),
    "a group that matches nothing": (["optim.groups={projector: {lr: 1}}"], None, r"optim\.groups 'projector': matches no parameter"),
}  # fmt: skip


def plan(folder: Path, changes: list[str], resume: ResumeOptions | None = None) -> None:
    """Plan a run as a worker does before it joins the others."""
    from dstrain.training.plan import make_plan

    wish = TrainRequest(recipe=RECIPE, overrides=changes)
    try:
        make_plan(resolve_recipe(wish), folder / "run", resume or ResumeOptions(), Worker(0, 0, 1, "tests", 1))
    finally:
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("wrong", WORKER_TABLE)
def test_what_only_a_worker_sees_is_said_before_any_process_group(wrong: str, folder: Path) -> None:
    changes, write, wanted = WORKER_TABLE[wrong]
    if write:
        write(folder)
    with pytest.raises(UsageError, match=f"(?s){wanted}"):
        plan(folder, changes)
    assert not (folder / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "resume", "wanted"),
    [
        ([], ResumeOptions("nowhere"), r"--resume nowhere: holds no complete checkpoint"),
        (
            ["optim.lr=1"],
            ResumeOptions(),
            r"optim\.lr: is 1\.0, but the run was started with 0\.001.*--allow-change optim\.lr",
        ),
        (["seed=1", "optim.lr=1"], ResumeOptions(allowed_keys=["optim"]), r"^seed: is 1, .*--allow-change seed$"),
    ],
)
def test_a_run_goes_on_only_as_it_was_begun(
    changes: list[str], resume: ResumeOptions, wanted: str, folder: Path
) -> None:
    config = resolve_recipe(TrainRequest(recipe=RECIPE)).config
    write_run_config(folder / "run", config, {}, {})
    record = {"recipe": dump_training_recipe(config), "inputs": {}, "zero_stage": 2}
    kept = CheckpointStore(folder=folder / "run/checkpoints", world=SingleProcessWorld())
    kept.save(lambda place: {"w.dat": write_hashed_file(place / "w.dat", b"x")}, Progress(2, 8), record, None)
    plan(folder, [])
    with pytest.raises(UsageError, match=wanted):
        plan(folder, changes, resume)
