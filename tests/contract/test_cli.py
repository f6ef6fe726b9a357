"""What the commands print, and which of several sayings counts."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from dstrain.batch import Progress
from dstrain.cli import main
from dstrain.commands.data import NO_TOKENIZER_HINT
from dstrain.commands.recipe_args import TrainRequest, list_builtin_recipes, resolve_recipe
from dstrain.config import read_recipe
from dstrain.distributed.world import SingleProcessWorld
from dstrain.launch.plan import LaunchOptions
from dstrain.preset import preset_names, read_preset
from dstrain.tasks import builtin_tasks, find_task, task_options
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.state.manifest import write_hashed_file
from tests.vocabulary import invoke


def test_every_option_of_every_command_has_help() -> None:
    commands = {**main.commands, "data check": main.commands["data"].commands["check"]}  # type: ignore[attr-defined]
    for name, command in commands.items():
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, f"{name} {option.name}"  # type: ignore[attr-defined]


def test_launch_options_stand_apart() -> None:
    for name in ("train", "evaluate", "generate", "prepare"):
        own, _, launch = invoke(name, "--help").output.partition("Launch options:")
        assert set(re.findall(r"^  --([\w-]+)", launch, re.M)) == {
            option.replace("_", "-") for option in LaunchOptions.__dataclass_fields__
        }
        assert "--set" in own
        assert not re.findall(r"^  \[?RECIPE|^  RUN_OR_MODEL", own, re.M), "an argument is no option"
    assert "Launch options" not in invoke("export", "--help").output


def test_an_option_may_have_underscores() -> None:
    for option in main.commands["train"].params:
        if isinstance(option, click.Option) and option.name not in ("overrides", "allowed_changes", "dry_run"):
            assert f"--{option.name}" in option.opts


@pytest.mark.parametrize("task", builtin_tasks())
def test_a_task_prints_its_options_with_their_help(task: str) -> None:
    assert task in invoke("tasks").output
    printed = invoke("tasks", task).output
    for option in task_options(find_task(task)):
        assert f"  {option.name}: {option.type} = {option.default!r}\n      {option.help}" in printed
        assert option.help


def hollow(folder: Path) -> None:
    """A file, a run without checkpoints, an exported folder of nothing, a good data file."""
    (folder / "file").write_text("x")
    (folder / "run").mkdir()
    (folder / "run/recipe.yaml").write_text("task: rm\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    (folder / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("data check '' --task rm", "FILE"),
        ("train ''", "[RECIPE]"),
        ("train --hostfile ''", "--hostfile"),
        ("prepare ''", "[RECIPE]"),
        ("plan ''", "[RECIPE]"),
        ("bench ''", "[RECIPE]"),
        ("evaluate '' --data pairs.jsonl", "RUN_OR_MODEL"),
        ("evaluate run --data ''", "--data"),
        ("generate '' --prompt x", "RUN_OR_MODEL"),
        ("generate run --data ''", "--data"),
        ("generate run --prompt x --image ''", "--image"),
        ("export '' --to out", "RUN"),
        ("export run --to ''", "--to"),
        ("checkpoints ''", "RUN"),
        ("report ''", "RUN..."),
        ("report run --to ''", "--to"),
        ("status ''", "RUN"),
        ("init rm --to ''", "--to"),
        ("presets --adopt ''", "--adopt"),
        ("selftest --keep ''", "--keep"),
    ],
)
def test_an_empty_path_is_refused_by_the_arguments_name(
    command: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hollow(tmp_path)
    result = invoke(*shlex.split(command))
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{named}': is empty; give a path" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("tasks rmm", "did you mean 'rm'?"),
        ("presets zeroo2", "did you mean 'zero2'?"),
        ("recipes demo-rmm", "did you mean 'demo-rm'?"),
        ("presets --adopt file", "not valid JSON"),
        ("presets --adopt run", "cannot be read"),
        ("init rmm", "did you mean 'rm'?"),
        ("init rm --to no/such/new.yaml", "cannot be written (No such file or directory)"),
        ("data check nowhere.jsonl --task rm", "there is no file nowhere.jsonl"),
        ("data check run --task rm", "is a folder"),
        ("data check file --task rm", "data files end in .jsonl"),
        ("data check pairs.jsonl --task rmm", "did you mean 'rm'?"),
        ("data check pairs.jsonl", "name the task that reads the file with --task, or a recipe with --recipe"),
        (
            "data check pairs.jsonl --task rm --set data.columns={choosen:chosen}",
            "has a column 'choosen:chosen' without a value; write a blank after the colon",
        ),
        ("checkpoints run", "has no checkpoints folder"),
        ("export run --to out", "has no complete checkpoint"),
        ("export run --to file", "is a file; choose another name"),
        ("export run --to run", "exists and is not empty"),
        ("export model --to out", "name its task"),
        ("evaluate run --data pairs.jsonl", "has no complete checkpoint"),
        ("evaluate model --data pairs.jsonl --task rm", "holds no weights"),
    ],
)
def test_commands_say_what_is_wrong(command: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hollow(tmp_path)
    result = invoke(*command.split())
    assert result.exit_code == 2, result.output
    assert wanted in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("policy", "found"), [(None, "1000"), ("active", None)])
def test_threads_wait_for_a_short_time_unless_asked_otherwise(
    policy: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert invoke("tasks").exit_code == 0
    assert os.environ.get("GOMP_SPINCOUNT") == found


def test_deepspeed_may_put_its_rank_before_the_command() -> None:
    assert invoke("--local_rank=1", "tasks").exit_code == 0
    assert "local_rank" not in invoke("--help").output


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_prints(name: str) -> None:
    assert name in invoke("presets").output
    assert "zero_optimization" in invoke("presets", name).output


def test_an_adopted_preset_reads_clean(tmp_path: Path) -> None:
    public = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto",
              "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}  # fmt: skip
    (tmp_path / "public.json").write_text(json.dumps(public))
    result = invoke("presets", "--adopt", str(tmp_path / "public.json"))
    assert result.exit_code == 0
    (tmp_path / "ours.json").write_text(result.stdout)
    assert read_preset(str(tmp_path / "ours.json")).stage == 3
    assert "optim.lr" in result.stderr, "what went where"


def test_presets_are_listed_with_a_sentence_each() -> None:
    lines = invoke("presets").output.splitlines()[1 : len(preset_names()) + 1]
    assert [line.split()[0] for line in lines] == preset_names()
    assert all(len(line.split()) > 3 for line in lines), lines


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_every_recipe_reads_clean(name: str) -> None:
    assert name in invoke("recipes").output
    assert yaml.safe_load(invoke("recipes", name).output)["task"] in builtin_tasks()
    assert resolve_recipe(TrainRequest(recipe=name)).config.task


@pytest.mark.parametrize("task", builtin_tasks())
def test_a_starter_recipe_reads_clean_and_explains_itself(task: str, tmp_path: Path) -> None:
    assert invoke("init", task, "--to", str(tmp_path / "new.yaml")).exit_code == 0
    text = (tmp_path / "new.yaml").read_text()
    assert read_recipe(tmp_path / "new.yaml").config.task == task
    assert all("#" in line for line in text.splitlines() if line.startswith("  ")), "a comment beside every key"
    assert invoke("init", task, "--to", str(tmp_path / "new.yaml")).exit_code == 2
    assert (tmp_path / "new.yaml").read_text() == text


@pytest.mark.parametrize(
    ("task", "metric", "best"), [("rm", "accuracy", "max"), ("dpo", "accuracy", "max"), ("sft", "loss", "min")]
)
def test_a_starter_recipe_has_the_rate_and_the_metric_of_its_task(
    task: str, metric: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a GPU that is small for full training it has adapters
    text = invoke("init", task).output
    told = yaml.safe_load(text)
    assert (told["eval"]["metric"], told["eval"]["best"]) == (metric, best)
    assert told["optim"]["lr"] == find_task(task).learning_rate
    (tmp_path / "r.yaml").write_text(text.replace("  # lora: ", "  lora: "))
    assert read_recipe(tmp_path / "r.yaml").config.model.lora is not None


def test_data_check_names_every_bad_record(tmp_path: Path) -> None:
    rows = [
        '{"prompt": "p", "chosen": "a", "rejected": "b"}',
        "no json",
        '{"prompt": "p", "chosen": "", "rejected": "b"}',
        '{"chosen": 3}',
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    bad = invoke("data", "check", str(tmp_path / "pairs.jsonl"), "--task", "rm")
    assert bad.exit_code == 2
    for line in (2, 3, 4):
        assert f"pairs.jsonl:{line}: " in bad.output
    (tmp_path / "good.jsonl").write_text(rows[0])
    good = invoke("data", "check", str(tmp_path / "good.jsonl"), "--task", "rm")
    (tmp_path / "r.yaml").write_text("task: rm\n")
    of_recipe = invoke("data", "check", str(tmp_path / "good.jsonl"), "--recipe", str(tmp_path / "r.yaml"))
    assert of_recipe.output == good.output
    total, columns, hint = good.output.splitlines()
    assert (good.exit_code, total, hint) == (0, "1 good records, 0 bad", NO_TOKENIZER_HINT)
    assert columns.endswith("good.jsonl: 1 record; read: chosen, rejected, prompt")


def test_data_check_shows_a_terminal_the_first_ten_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ['{"prompt": "p", "chosen": "a", "rejected": "a"}'] * 2000 + [
        '{"prompt": null, "chosen": "a", "rejected": "b"}'
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    words = ["data", "check", str(tmp_path / "pairs.jsonl"), "--task", "rm"]
    assert len(invoke(*words).stdout.splitlines()) == 2001, "a script gets every one"
    monkeypatch.setattr("dstrain.cli.is_terminal", lambda: True)
    told = invoke(*words).stdout.splitlines()
    assert len(told) == 10 + 1 + 1 + 1
    assert told[10] == f"… and 1990 more like {tmp_path}/pairs.jsonl:10"
    assert told[11].startswith(f"{tmp_path}/pairs.jsonl:2001: 'prompt' is null")
    assert told[12] == "`--all` lists every one"
    assert len(invoke(*words, "--all").stdout.splitlines()) == 2001


def test_data_check_of_images_says_what_training_says(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "ok"}]
    rows = [
        {"messages": turns},
        {"question": "q", "answer": "a", "image": ""},
        {"question": "q", "answer": "a", "image": None},
    ]
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = invoke("data", "check", str(tmp_path / "seen.jsonl"), "--task", "vlm")
    assert told.exit_code == 2
    for words in (
        "seen.jsonl:1: 1 placeholder (<image>) and 0 images: more placeholders than images",
        "seen.jsonl:2: 'image' is an empty path; write the path, or remove the key",
        "seen.jsonl:3: note: 'image' is null: the record is used as text alone",
        "1 good records, 2 bad, 1 note on records that can be used",
    ):
        assert words in told.output


def test_checkpoints_tells_whole_from_damaged(tmp_path: Path) -> None:
    kept = CheckpointStore(folder=tmp_path / "checkpoints", world=SingleProcessWorld())
    for step, metric in ((10, 0.9), (20, 0.4)):
        kept.save(
            lambda folder: {"w.dat": write_hashed_file(folder / "w.dat", b"x" * 100)},
            Progress(step, step * 4),
            {"zero_stage": 2, "recipe": {"eval": {"best": "max"}}},
            metric,
        )
    (tmp_path / "checkpoints/step-00000020/w.dat").write_bytes(b"y" * 100)
    verified = invoke("checkpoints", str(tmp_path), "--verify", "--json")
    assert verified.exit_code == 1, "damage was found"
    rows = json.loads(verified.stdout)
    assert all(row["bytes"] > 100 for row in rows)
    assert [(row["step"], row["best"]) for row in rows] == [(20, False), (10, True)]
    assert rows[0]["state"].startswith("damaged: w.dat")
    assert rows[1]["state"] == "whole"
    listed = invoke("checkpoints", str(tmp_path))
    assert "whole, best" in listed.output
    assert listed.exit_code == 0, "sizes alone find nothing"


def test_the_later_option_wins(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: rm\nds_config: zero1\noptim: {lr: 1e-5}\n")
    told = resolve_recipe(
        TrainRequest(recipe=str(tmp_path / "r.yaml"), overrides=["optim.lr=2e-5", "optim.lr=3e-5"], ds_config="zero3")
    ).config
    assert told.optim.lr == 3e-5
    assert told.ds_config == "zero3"
    (tmp_path / "own.json").write_text('{"zero_optimization": {"stage": 1}}')
    both = TrainRequest(
        recipe=str(tmp_path / "r.yaml"), overrides=["ds_config=zero2", "task=x"], task="rm", ds_config="./own.json"
    )
    assert resolve_recipe(both).config.ds_config == str(tmp_path / "own.json"), "beside the recipe, made absolute"
    assert resolve_recipe(both).config.task == "rm"
    assert read_recipe(tmp_path / "r.yaml").config.optim.lr == 1e-5, (
        "1e-5 is a number, though YAML 1.1 has it for a word"
    )


def test_a_dry_run_prints_all_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    result = invoke("train", "demo-rm", "--dry-run", "--num_gpus", "2")
    assert result.exit_code == 0
    for words in ("# recipe", "task: rm", "# DeepSpeed JSON", '"stage": 2', "# launch", "2 processes"):
        assert words in result.output
    assert "RANK=<0 to 1> LOCAL_RANK=<0 to 1> WORLD_SIZE=2" in result.output
    assert not list(tmp_path.iterdir())


RATE = "peak learning rate 0.0005: optim.lr 0.001, scaled (sqrt) from steps of 256 to 64 samples"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--num-gpus 9999 --set batch.total=9999", ["warning: 9999 processes are started on this machine, which has "]),
        (
            "--num-gpus 8 --set 'batch={total: 16, micro: 8}'",
            [
                '"train_batch_size": 16',
                "steps of 16 samples (8 processes x 1 forward pass x 2 samples)",
                "warning: batch.micro is 8, but",
            ],
        ),
        (
            "--num-gpus 2 --set 'batch={total: 16, tokens_per_micro: 4096}'",
            ["steps of 16 samples (2 processes, forward passes of up to 4096 tokens each)"],
        ),
        ("--num-gpus 1 --set 'batch={total: 64, micro: 8}' --set optim.lr=0.001 --set optim.scale_lr=sqrt", [RATE]),
        ("--num-gpus 4 --set 'batch={total: 64, micro: 8}' --set optim.lr=0.001 --set optim.scale_lr=sqrt", [RATE]),
    ],
    ids=["more processes than cores", "a batch", "a batch of tokens", "a rate on 1 process", "a rate on 4"],
)
def test_a_dry_run_shows_what_is_trained(
    words: str, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    result = invoke("train", "demo-rm", "--dry-run", *shlex.split(words))
    assert result.exit_code == 0
    for line in shown:
        assert line in result.output
    assert ('"train_batch_size"' in result.output) == ("tokens_per_micro" not in words)


def test_a_folder_called_like_a_task_or_a_preset_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--run-dir rm` makes such a folder, and the same command again must find its task."""
    monkeypatch.chdir(tmp_path)
    for name in ("rm", "zero1", "judge"):
        (tmp_path / name).mkdir()
    (tmp_path / "r.yaml").write_text("task: rm\nds_config: zero1\nmodel: {path: judge}\n")
    told = resolve_recipe(TrainRequest(recipe="r.yaml")).config
    assert (told.task, told.ds_config) == ("rm", "zero1")
    assert told.model.path == str(tmp_path / "judge"), "a folder may be a model"
