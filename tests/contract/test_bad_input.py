"""Bad input: one message that names the place and the mend, exit 2, nothing started, nothing written."""

from __future__ import annotations

import json
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
from dstrain.commands.find import Wish, resolve_wish
from dstrain.config.names import NOT_YET
from dstrain.errors import UsageError
from dstrain.launch.topology import Worker
from dstrain.tasks import find_task
from dstrain.train.checkpoint import Checkpoints
from dstrain.train.folder import Resume, write_start
from dstrain.world import SoloWorld

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
    "a word": (recipe("rm"), ["is a str", "a recipe is a mapping"]),
    "an alias inside itself": (recipe("task: rm\noptions: &a {x: *a}\n"), ["bad.yaml", "an alias (*) inside what it names"]),
    "a thousand brackets": (recipe("task: rm\noptions: " + "[" * 3000 + "]" * 3000), ["bad.yaml", "nested too deeply"]),
    "a date that is none": (recipe("task: rm\nseed: 2020-13-45\n"), ["bad.yaml", "month must be in", "quote it"]),
    "two documents": (recipe("task: rm\n---\ntask: rm\n"), ["bad.yaml:2", "another document"]),
    "Python in YAML": (recipe("task: !!python/object:os.system x\n"), ["bad.yaml:1", "could not determine a constructor"]),
    "a deep key misspelt in a file": (recipe("task: rm\noptim:\n  groups:\n    head: {lrr: 1}\n"), ["bad.yaml:4 optim.groups.head.lrr", "did you mean 'lr'?"]),
    "a key misspelt in a list": (recipe("task: rm\ndata:\n  train:\n    - {path: x, wieght: 2}\n"), ["bad.yaml:4 data.train.0.wieght", "did you mean 'weight'?"]),
    "a key misspelt in a --set block": (sets("data.train={path: train.jsonl, wieght: 2}"), ["--set data.train.wieght", "did you mean 'weight'?"]),
    "a key misspelt in a choice": (sets("model.tokenizer={vocab_sizee: 300}"), ["--set model.tokenizer.vocab_sizee", "did you mean 'vocab_size'?"]),
    "a number for a block": (sets("optim=5"), ["--set optim", "a block of keys"]),
    "one beta": (sets("optim.betas=[0.9]"), ["optim.betas", "needs at least 2 values"]),
    "true for a number": (sets("steps=true"), ["--set steps", "is True", "should be a number"]),
    "true for a rate": (sets("optim.lr=yes"), ["--set optim.lr", "is True", "should be a number"]),
    "true for a number in a list": (sets("data.train=[{path: train.jsonl, weight: true}]"), ["data.train.0.weight", "is True", "should be a number"]),
    "true for a number of the task": (sets("options.center_rewards_coefficient=true"), ["options.center_rewards_coefficient", "should be a number"]),
    "no for a column": (sets("data.columns={no: chosen}"), ["data.columns", "is no text", "quotation marks"]),
    "an endless timeout": (sets("timeout_minutes=1e99"), ["timeout_minutes", "less than or equal to 1000000"]),
    "rates on a rate of 0": (sets("optim.lr=0", "optim.groups={score: {lr: 1}}"), ["--set optim.lr", "multiples of it", "model.freeze"]),
    "a config whose kind is a number": (sets("model.config.model_type=5"), ["model.config", "has no model_type"]),
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
    "a blank for a data file": (recipe("task: rm\ndata:\n  train:\n"), ["bad.yaml:3 data.train: is None", "a file, or a list of files"]),
    "a number for a data file": (sets("data.train=[train.jsonl, 5]"), ["--set data.train", "a file, or a list of files"]),
    "a weight of 0": (sets("data.train=[{path: train.jsonl, weight: 0}]"), ["data.train", "greater than 0"]),
    "--set without a value": (sets("optim.lr"), ["--set optim.lr: has no value", "--set optim.lr=2e-5"]),
    "--set without a key": (sets("=1"), ["--set =1: names no key", "--set optim.lr=2e-5"]),
    "--set into a block there is not": (sets("optimm.lr=1"), ["--set optimm: no such key", "did you mean 'optim'?"]),
    "a home of nobody": (lambda folder: ["~nosuchuser/r.yaml"], ["begins with ~", "no home folder is known", "set HOME"]),
    "a home of nobody for data": (sets("data.train=~nosuchuser/x.jsonl"), ["begins with ~"]),
    "a task of a dot": (lambda folder: [RECIPE, "--task", "."], ["is no file", "a Python file that defines a task"]),
    "--set into a number": (sets("steps.x=1"), ["steps is no block of keys"]),
    "--set of no YAML": (sets("optim={lr"), ["the value is no YAML"]),
    "a task misspelt": (sets("task=rmm"), ["task 'rmm'", "did you mean 'rm'?"]),
    "a task that comes later": (sets("task=dpo"), ["task 'dpo'", "there is no such task"]),
    "a task file that is not there": (lambda folder: [RECIPE, "--task", "./nowhere.py"], ["nowhere.py", "is no file"]),
    "a task file of no Python": (task("def ("), ["own.py", "cannot be imported (SyntaxError"]),
    "a task file that leaves": (task("import sys\nsys.exit(0)\n"), ["own.py", "cannot be imported (SystemExit"]),
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
    "a preset misspelt as an option": (lambda folder: [RECIPE, "--ds-config", "zeroo2"], ["ds_config zeroo2", "did you mean 'zero2'?"]),
    "a preset of braces": (lambda folder: [RECIPE, "--ds-config", "{x"], ["ds_config {x", "there is no such preset"]),
    "a preset of nothing": (lambda folder: [RECIPE, "--ds-config", ""], ["there is no such preset", "zero2"]),
    "a task of nothing": (lambda folder: [RECIPE, "--task", ""], ["--task task: is missing"]),
    "an option there is not": (lambda folder: [RECIPE, "--num-gpu", "2"], ["No such option", "--num-gpu"]),
    "a word for a count": (lambda folder: [RECIPE, "--num-gpus", "two"], ["--num-gpus", "'two' is not a valid integer"]),
    "no process": (lambda folder: [RECIPE, "--num-gpus", "0"], ["--num-gpus 0 starts no process"]),
    "a port that is none": (lambda folder: [RECIPE, "--num-gpus", "1", "--master-port", "99999"], ["--master-port 99999 is no port"]),
    "a launcher there is not": (lambda folder: [RECIPE, "--launcher", "mpi"], ["--launcher", "'mpi' is not one of"]),
    "a key to change that is none": (lambda folder: [RECIPE, "--allow-change", "optim.lrr"], ["--allow-change optim.lrr: no such key", "did you mean 'optim.lr'?"]),
    "a key to change from elsewhere": (lambda folder: [RECIPE, "--allow-change", "zzz"], ["--allow-change zzz: no such key", "as the recipe has it"]),
    "two recipes": (lambda folder: [RECIPE, RECIPE], ["unexpected extra argument"]),
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
    assert len(TABLE) >= 90
    assert len(said) >= 75


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


# Found by a worker, which reads models and data, still before any process group.
WORKER_TABLE: dict[str, tuple[list[str], Callable[[Path], None] | None, str]] = {
    "a kind of model misspelt": (["model.config.model_type=lama"], None, r"model_type: 'lama' is none of transformers'.*llama"),
    "a setting of the model misspelt": (["model.config.hiden_size=8"], None, r"model\.config\.hiden_size.*did you mean 'hidden_size'"),
    "a folder that is not there": (["model.config=null", "model.path=./nowhere"], None, r"model\.path.*'\./nowhere' is no folder"),
    "a folder without weights": (["model.config=null", "model.path=./model"], without_weights, r"model\.path.*holds no weights"),
    "weights that git left behind": (["model.config=null", "model.path=./model"], damaged, r"model/model\.safetensors is damaged.*git lfs pull"),
    "a shard that is missing": (["model.config=null", "model.path=./model"], without_a_shard, r"00002-of-00002\.safetensors is not there.*fetch it again"),
    "a model that gives no score": (["model.config=null", "model.path=./model", "model.tokenizer={vocab_size: 300}"], of_pictures, r"model\.path: the model cannot be built.*ViTConfig.*name another model"),
    "a folder whose config cannot be": (["model.config=null", "model.path=./model"], without_heads, r"model\.path: .* cannot be loaded \(ZeroDivisionError"),
    "a config that cannot be": (["model.config.num_attention_heads=0"], None, r"model\.config: ZeroDivisionError.*correct the value"),
    "attention that is not installed": (["model.attention=flash_attention_2"], None, r"model\.attention: the model cannot be built.*take sdpa"),
    "neither path nor config": (["model.config=null"], None, r"has neither path nor config"),
    "a width the heads do not divide": (["model.config.hidden_size=31"], None, r"model\.config.*31.*is not a multiple"),
    "a width of letters": (["model.config.hidden_size=abc"], None, r"model\.config.*'hidden_size' expected int"),
    "a width below 0": (["model.config.hidden_size=-8"], None, r"model\.config: the model cannot be built.*negative dimension"),
    "an activation misspelt": (["model.config.hidden_act=siluu"], None, r"model\.config: the model cannot be built.*siluu"),
    "no vocabulary": (["model.config.vocab_size=0"], None, r"at least 258 entries, not 0"),
    "a tokenizer that is not there": (["model.tokenizer=./nowhere"], None, r"model\.tokenizer: '\./nowhere' is no folder"),
    "a folder without tokenizer": (["model.tokenizer=."], None, r"model\.tokenizer: .* cannot be loaded"),
    "no data": (["data.train=[]"], None, r"data\.train: names no file"),
    "a folder of data": (["data.train=."], None, r"is a folder; name a \.jsonl"),
    "a vocabulary too small": (["model.config.vocab_size=300", "model.tokenizer={vocab_size: 320}"], None, r"the tokenizer has 3\d\d entries, the model 300"),
    "a tokenizer too small": (["model.tokenizer={vocab_size: 9}"], None, r"at least 258 entries"),
    "bad records": ([], with_records(4), r"4 of 64 records \(6\.2%\).*train\.jsonl:6.*on_error: skip"),
    "one bad record that is not to be": (["data.on_error=fail"], with_records(1), r"1 of 64 records.*data\.on_error is fail"),
    "a column misspelt": (["data.columns={choosen: chosen}"], None, r"data\.columns\.choosen.*did you mean 'chosen'"),
    "a freeze that matches nothing": (["model.freeze=[visoin]"], None, r"model\.freeze 'visoin': matches no parameter"),
    "a freeze of everything": (["model.freeze=['*']"], None, r"model\.freeze: leaves no parameter to train"),
    "a group that matches nothing": (["optim.groups={projector: {lr: 1}}"], None, r"optim\.groups 'projector': matches no parameter"),
}  # fmt: skip


def plan(folder: Path, changes: list[str], resume: Resume | None = None) -> None:
    """Plan a run as a worker does before it joins the others."""
    from dstrain.train.assemble import make_plan

    wish = Wish(recipe=RECIPE, sets=changes)
    try:
        make_plan(resolve_wish(wish), folder / "run", resume or Resume(), Worker(0, 0, 1, "tests", 1))
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
        ([], Resume("never"), r"--resume never: .* already holds step 2; choose another --run-dir"),
        ([], Resume("nowhere"), r"--resume nowhere: holds no whole checkpoint"),
        (
            ["optim.lr=1"],
            Resume(),
            r"optim\.lr: is 1\.0, but the run was started with 0\.001.*--allow-change optim\.lr",
        ),
        (["seed=1", "optim.lr=1"], Resume(allowed=["optim"]), r"^seed: is 1, .*--allow-change seed$"),
        (["ds_config=zero3"], Resume(), r"was written by 1 processes at ZeRO stage 2, and this is 1 at stage 3"),
    ],
)
def test_a_run_goes_on_only_as_it_was_begun(changes: list[str], resume: Resume, wanted: str, folder: Path) -> None:
    write_start(folder / "run", resolve_wish(Wish(recipe=RECIPE)).config, {}, {})
    kept = Checkpoints(folder=folder / "run/checkpoints", world=SoloWorld())
    kept.save(lambda place: (place / "w.bin").write_bytes(b"x"), Progress(2, 8), {"zero_stage": 2}, None)
    plan(folder, [])
    with pytest.raises(UsageError, match=wanted):
        plan(folder, changes, resume)
