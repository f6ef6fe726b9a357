"""Bad input: one message that names the place and the mend, exit 2, nothing started, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.commands.find import Wish, resolve_wish
from dstrain.config.names import NOT_YET
from dstrain.errors import UsageError
from dstrain.launch.topology import Worker
from dstrain.tasks import find_task
from dstrain.train.folder import Resume

Folder = Path
RECIPE = "recipe.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe in it; launching fails the test."""
    values = find_task("rm").tiny(tmp_path)
    (tmp_path / RECIPE).write_text(yaml.safe_dump(values, sort_keys=False))
    monkeypatch.chdir(tmp_path)

    def never(*arguments: Any) -> int:
        raise AssertionError("something was launched")

    monkeypatch.setattr("dstrain.launch.supervise.supervise", never)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["train", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


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


TASK = "from dataclasses import dataclass\nfrom dstrain.tasks import Task\n"
BODY = "    def examples(self, split): ...\n    def collate(self, examples): ...\n    def build_model(self): ...\n    def loss(self, model, batch): ...\n"

# What is wrong: how it is written, and what the message must say.
TABLE: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "a key misspelt": (sets("optim.lrr=1"), ["--set optim.lrr", "no such key", "did you mean 'lr'?"]),
    "a key misspelt in a file": (recipe("task: rm\noptim:\n  warmupp: 3\n"), ["bad.yaml:3 optim.warmupp", "did you mean 'warmup'?"]),
    "a key at the wrong level": (sets("lr=1"), ["did you mean 'optim.lr'?"]),
    "HF's batch size": (sets("per_device_train_batch_size=1"), ["here it is batch.micro"]),
    "HF's output folder": (sets("output_dir=x"), ["here it is --run-dir"]),
    "HF's best model": (sets("load_best_model_at_end=true"), ["`dstrain export --step best`"]),
    "TRL's length": (sets("max_seq_length=1"), ["here it is data.max_length"]),
    "LLaMA-Factory's length": (sets("cutoff_len=1"), ["here it is data.max_length"]),
    "LLaMA-Factory's model": (sets("model_name_or_path=x"), ["here it is model.path"]),
    "YAML that does not parse": (recipe("task: rm\noptim: {lr: 1\nsteps: 3\n"), ["bad.yaml:3", "check the indentation"]),
    "a tab": (recipe("task: rm\noptim:\n\tlr: 1\n"), ["bad.yaml:3", "check the indentation"]),
    "a key twice": (recipe("task: rm\nseed: 1\nseed: 2\n"), ["bad.yaml:3 seed", "stands at bad.yaml:2 too"]),
    "a list": (recipe("- task\n- rm\n"), ["is a list", "a recipe is a mapping"]),
    "an empty file": (recipe(""), ["task", "is missing", "`dstrain tasks`"]),
    "no text": (lambda folder: [(folder / "bad.yaml").write_bytes(b"\xff\xfe\x00") and "bad.yaml"], ["no UTF-8 text"]),
    "no such recipe": (lambda folder: ["nowhere.yaml"], ["nowhere.yaml", "there is no such file", "check the path"]),
    "a packaged name misspelt": (lambda folder: ["demo-rmm"], ["did you mean 'demo-rm'?"]),
    "a word for a number": (sets("optim.lr=fast"), ["--set optim.lr", "valid number"]),
    "a list for a number": (sets("eval.every=[1]"), ["--set eval.every", "valid integer or", "'epoch'"]),
    "a negative clip": (sets("optim.clip=-1"), ["optim.clip", "greater than or equal to 0"]),
    "a beta of 2": (sets("optim.betas=[0.9,2]"), ["optim.betas", "less than 1"]),
    "infinity": (sets("optim.lr=.inf"), ["optim.lr", "finite number"]),
    "no number": (sets("optim.lr=.nan"), ["optim.lr", "finite number"]),
    "a batch of 0": (sets("batch.micro=0"), ["batch.micro", "greater than or equal to 1"]),
    "an unknown schedule": (sets("optim.schedule=cosinus"), ["optim.schedule", "'cosine'"]),
    "steps and epochs": (sets("epochs=2"), ["epochs", "stands beside steps", "keep one"]),
    "two kinds of held-out data": (sets("data.eval_fraction=0.1"), ["data.eval_fraction", "stands beside data.eval"]),
    "micro above total": (sets("batch.micro=8"), ["batch.micro", "above batch.total (4)"]),
    "a batch that does not add up": (sets("batch.accumulate=3"), ["total 4 = micro 2 x accumulate 3", "leave accumulate out (it would be 2)"]),
    "a model twice": (sets("model.path=x"), ["model.config", "stands beside model.path"]),
    "a config of no kind": (sets("model.config={hidden_size: 8}"), ["model.config", "has no model_type"]),
    "a prompt above the length": (sets("data.max_prompt_length=99"), ["data.max_prompt_length", "above data.max_length (48)"]),
    "a warmup above the steps": (sets("optim.warmup=9"), ["optim.warmup", "of only 4 steps"]),
    "a base without scaling": (sets("optim.scale_lr_base=8"), ["optim.scale_lr_base", "has no effect"]),
    "a data file misspelt": (sets("data.train=trian.jsonl"), ["trian.jsonl", "there is no such file", "did you mean 'train.jsonl'?"]),
    "a hub name": (sets("data.train=Anthropic/hh-rlhf"), ["Anthropic/hh-rlhf", "hub are not supported yet"]),
    "a weight of 0": (sets("data.train=[{path: train.jsonl, weight: 0}]"), ["data.train", "greater than 0"]),
    "--set without a value": (sets("optim.lr"), ["--set optim.lr: has no value", "--set optim.lr=2e-5"]),
    "--set into a number": (sets("steps.x=1"), ["steps is no block of keys"]),
    "--set of no YAML": (sets("optim={lr"), ["the value is no YAML"]),
    "a task misspelt": (sets("task=rmm"), ["task 'rmm'", "did you mean 'rm'?"]),
    "a task that comes later": (sets("task=dpo"), ["task 'dpo'", "there is no such task"]),
    "a task file that is not there": (lambda folder: [RECIPE, "--task", "./nowhere.py"], ["nowhere.py", "is no file"]),
    "a task file of no Python": (task("def ("), ["own.py", "cannot be imported (SyntaxError"]),
    "a task file of two tasks": (
        task(TASK + f"@dataclass(frozen=True, kw_only=True)\nclass A(Task):\n{BODY}@dataclass(frozen=True, kw_only=True)\nclass B(A):\n    x: int = 1\n"),
        ["defines A, B", "one concrete subclass"],
    ),
    "a task file of no task": (task("x = 1"), ["defines none"]),
    "a task that is no dataclass": (task(TASK + f"class A(Task):\n{BODY}"), ["A is no dataclass", "@dataclass(frozen=True, kw_only=True)"]),
    "an option misspelt": (sets("options.label_smooting=0.1"), ["options.label_smooting", "did you mean 'label_smoothing'?"]),
    "an option of the wrong kind": (sets("options.disable_dropout=maybe"), ["options.disable_dropout", "valid boolean"]),
    "an option out of range": (sets("options.label_smoothing=0.7"), ["label_smoothing is 0.7", "below 0.5"]),
    "a metric misspelt": (sets("eval.metric=acuracy"), ["eval.metric", "did you mean 'accuracy'?"]),
    "a preset misspelt": (sets("ds_config=zero22"), ["zero22", "zero2"]),
    "a JSON that is not there": (sets("ds_config=./nowhere.json"), ["nowhere.json"]),
    "a JSON of no JSON": (preset("{"), ["ds.json"]),
    "a block misspelt": (preset({"zero_optimisation": {"stage": 2}}), ["ds.json:1 zero_optimisation", "did you mean 'zero_optimization'?"]),
    "a deep key misspelt": (preset({"zero_optimization": {"stage": 2, "overlap_com": True}}), ["zero_optimization.overlap_com", "did you mean 'overlap_comm'?"]),
    "auto": (preset({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}), ['"auto"', "this JSON would do", '"stage": 2']),
    "learning in a JSON": (preset({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}), ["optimizer", "belongs to the recipe (optim)"]),
    "clipping in a JSON": (preset({"gradient_clipping": 1.0}), ["gradient_clipping", "optim.clip"]),
    "offload below stage 3": (preset({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}), ["offload_param", "stage"]),
    "stage 4": (preset({"zero_optimization": {"stage": 4}}), ["zero_optimization.stage"]),
    "two precisions": (preset({"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}), ["fp16", "bf16"]),
    "two micros": (preset({"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"stage": 1}}), ["batch.micro", "is 2 in the recipe and 7"]),
    "fp16 on a CPU": (sets("precision=fp16"), ["fp16 needs a GPU", "precision: bf16 or fp32"]),
    "fp16 at stage 0": (sets("precision=fp16", "ds_config=zero0"), ["stage 0", "zero1"]),
    "a hostfile": (lambda folder: [RECIPE, "--hostfile", "hosts"], ["host", "deepspeed --hostfile F --module dstrain.cli train R"]),
    "a run folder that is a file": (lambda folder: [RECIPE, "--run-dir", RECIPE], ["--run-dir", "cannot be written", "choose another folder"]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", TABLE)
def test_bad_input_is_named_with_its_mend(wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    write, wanted = TABLE[wrong]
    code, output = run(*write(folder))
    assert code == 2, output
    for words in wanted:
        assert words in output, output
    assert not (folder / "runs").exists()


def test_the_table_is_long_enough_and_its_messages_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = {run(*write(folder))[1] for write, _ in TABLE.values()}
    assert len(TABLE) >= 60
    assert len(said) >= 40


VALUES = {
    "model.init": "w.pt", "model.lora": "{rank: 4}", "model.quantize": "nf4", "batch.tokens_per_micro": "99", "batch.on_oom": "shrink",
    "optim.name": "muon", "compile": "true", "log.wandb": "{project: x}", "save.background": "true", "save.prune_when_full": "true",
    "profile": "{steps: [1, 2]}", "launch.env": "[A]", "ds_config": "auto",
}  # fmt: skip


@pytest.mark.parametrize("key", [key for key, _, _ in NOT_YET])
def test_what_comes_later_is_refused_never_ignored(key: str, folder: Path) -> None:
    mend = next(text for name, _, text in NOT_YET if name == key)
    code, output = run(RECIPE, "--set", f"{key}={VALUES.get(key, '[x]' if key.endswith('setup') else 'x')}")
    assert code == 2
    for words in (key, "is not supported yet", mend):
        assert words in output, output


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


# Found by a worker, which reads models and data, still before any process group.
WORKER_TABLE: dict[str, tuple[list[str], Callable[[Path], None] | None, str]] = {
    "a kind of model misspelt": (["model.config.model_type=lama"], None, r"model_type: 'lama' is none of transformers'.*llama"),
    "a setting of the model misspelt": (["model.config.hiden_size=8"], None, r"model\.config\.hiden_size.*did you mean 'hidden_size'"),
    "a folder that is not there": (["model.config=null", "model.path=./nowhere"], None, r"model\.path.*'\./nowhere' is no folder"),
    "a folder without weights": (["model.config=null", "model.path=./model"], without_weights, r"model\.path.*holds no weights"),
    "a vocabulary too small": (["model.config.vocab_size=300", "model.tokenizer={vocab_size: 320}"], None, r"the tokenizer has 3\d\d entries, the model 300"),
    "a tokenizer too small": (["model.tokenizer={vocab_size: 9}"], None, r"at least 258 entries"),
    "bad records": ([], with_records(4), r"4 of 64 records \(6\.2%\).*train\.jsonl:6.*on_error: skip"),
    "one bad record that is not to be": (["data.on_error=fail"], with_records(1), r"1 of 64 records.*data\.on_error is fail"),
    "a column misspelt": (["data.columns={choosen: chosen}"], None, r"data\.columns\.choosen.*did you mean 'chosen'"),
    "a freeze that matches nothing": (["model.freeze=[visoin]"], None, r"model\.freeze 'visoin': matches no parameter"),
    "a freeze of everything": (["model.freeze=['*']"], None, r"model\.freeze: leaves no parameter to train"),
    "a group that matches nothing": (["optim.groups={projector: {lr: 1}}"], None, r"optim\.groups 'projector': matches no parameter"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WORKER_TABLE)
def test_what_only_a_worker_sees_is_said_before_any_process_group(wrong: str, folder: Path) -> None:
    import torch.distributed

    from dstrain.train.assemble import make_plan

    changes, write, wanted = WORKER_TABLE[wrong]
    if write:
        write(folder)
    with pytest.raises(UsageError, match=f"(?s){wanted}"):
        make_plan(
            resolve_wish(Wish(recipe=RECIPE, sets=changes)), folder / "run", Resume(), Worker(0, 0, 1, "tests", 1)
        )
    assert not torch.distributed.is_initialized()
    assert not (folder / "run/checkpoints").exists()
