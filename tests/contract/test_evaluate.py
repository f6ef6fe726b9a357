"""A model is judged alike however many processes look at it, and however they hold it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.evaluate import EvaluateJob, check_reference
from dstrain.commands.export import export_model
from dstrain.commands.run_job import JobResult
from dstrain.commands.trained_model import ModelSelector, find_saved_model, make_eval_source
from dstrain.config.schema import RunConfig
from dstrain.errors import UsageError
from dstrain.launch.probe import free_port
from dstrain.tasks import make_task
from tests.cells import SLOW
from tests.contract.export_cases import make_run
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, read_jsonl, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"
EVALUATE = CASES + "evaluate"

RUNS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "rm": ("rm", "zero2", {}, {}),
    "rm, adapters": ("rm", "zero3", {}, {"lora": {"rank": 4}}),
    "sft, tied": ("sft", "zero3", {}, {}),
    "dpo, a reference in memory": ("dpo", "zero3", {}, {}),
    "dpo, a reference remembered": ("dpo", "zero1", {"precompute_ref_log_probs": True}, {}),
    "dpo, adapters": ("dpo", "zero3", {}, {"lora": {"rank": 4}}),
}
FAST = ("rm, adapters",)
"""References at every stage: parity/test_tasks."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, two: Workers) -> Any:
    """The folder of a run of two processes, with its data beside it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("run")
            task, preset, options, model = RUNS[name]
            values = tiny_recipe(task, folder) | {"options": options, "ds_config": preset, "eval": {"every": 4}}
            values["model"]["config"] |= {"tie_word_embeddings": "tied" in name}
            values["model"] |= model
            write_recipe(folder, values)
            two(RUN, recipe=str(folder / "recipe.yaml"), run_dir=str(folder / "run"))
            made[name] = folder
        return made[name]

    return of


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, float) and "second" not in name}


def logged(folder: Path, names: Any) -> dict[str, float]:
    rows = read_jsonl(folder / "run/metrics.jsonl")
    last = [row for row in rows if row["split"] == "eval"][-1]
    return {name: last[name] for name in names if name in last}


@pytest.mark.parametrize("name", [name if name in FAST else SLOW(name) for name in RUNS])
def test_metrics_do_not_depend_on_the_processes(name: str, trained: Any, one: Workers, two: Workers) -> None:
    folder = trained(name)
    asked = {"folder": str(folder / "run"), "data": str(folder / "eval.jsonl")}
    alone = one(EVALUATE, **asked)[0]
    found = numbers(alone)
    assert found | logged(folder, found) == pytest.approx(found, rel=1e-5, abs=1e-6), "what the run said itself"
    assert len(found) >= 2
    assert "eval.jsonl: 16 records; read:" in alone["notes"][0]
    for hold in (None, "zero3", "zero2"):
        for row in two(EVALUATE, **asked, ds_config=hold):
            assert numbers(row) == pytest.approx(found, rel=1e-5, abs=1e-6), hold
            assert row["examples"] == alone["examples"] == 16
    assert numbers(one(EVALUATE, **asked, ds_config="zero3")[0]) == pytest.approx(found, rel=1e-5, abs=1e-6)
    thirteen = [numbers(each(EVALUATE, **asked, sets=["data.max_samples=13"])[0]) for each in (one, two)]
    assert thirteen[1] == pytest.approx(thirteen[0], rel=1e-5, abs=1e-6), "a share without a sample weighs nothing"


def test_the_longer_answer_is_a_baseline_and_ties_count_half(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path)
    answers = [("a longer answer", "no"), ("no", "a longer answer"), ("a longer answer", "yes"), ("ab", "ba")]
    rows = [{"prompt": "why?", "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = make_task(RunConfig.model_validate(values))
    assert made.checks.baselines(made.examples("eval") or []) == {"length_baseline": pytest.approx(2.5 / 4)}


def test_an_exported_policy_is_not_its_own_reference(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"a policy cannot be its own reference.*--set options\.ref_model=FOLDER"):
        check_reference(find_saved_model(tmp_path, "best", task="dpo"))
    (tmp_path / "elsewhere").mkdir()
    check_reference(find_saved_model(tmp_path, "best", [f"options.ref_model={tmp_path}/elsewhere"], "dpo"))
    check_reference(find_saved_model(tmp_path, "best", ["options.loss_type=orpo"], "dpo"))
    check_reference(find_saved_model(tmp_path, "best", task="rm"))


def test_the_data_option_names_a_file_or_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.jsonl").write_text("{}\n")
    assert make_eval_source("eval.jsonl") == str(tmp_path / "eval.jsonl")
    assert make_eval_source("org/name") == {"path": "org/name", "split": None, "name": None}
    assert make_eval_source("org/name:dev:large") == {"path": "org/name", "split": "dev", "name": "large"}
    with pytest.raises(UsageError, match="there is no such file"):
        make_eval_source("evil.jsonl")


def test_a_worker_is_told_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.vocabulary import invoke

    told: list[Any] = []
    monkeypatch.setattr("dstrain.commands.run_job.run_job", lambda *args: told.append(args) or JobResult(0))
    asked = [
        "--data",
        "evil.jsonl",
        "--task",
        "sft",
        "--step",
        "3",
        "--set",
        "batch.micro=2",
        "--set",
        "seed=1",
        "--ds-config",
        "zero3",
    ]
    assert invoke("evaluate", str(tmp_path), *asked, "--num-gpus", "2").exit_code == 0
    first: EvaluateJob = told[0][0]
    assert told[0][1]["num_gpus"] == 2
    assert invoke(*first.to_argv(), "--scratch", str(tmp_path)).exit_code == 0
    assert told[1][0] == first
    assert told[1][2] == tmp_path
    wanted = ModelSelector(
        folder=tmp_path, step="3", task="sft", overrides=("batch.micro=2", "seed=1"), ds_config="zero3"
    )
    assert first.selector == wanted


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """With a folder for temporary files of its own."""
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, cwd=folder)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("dstrain evaluate {} --num-gpus 2", marks=pytest.mark.slow),
        pytest.param(
            "torchrun --nproc-per-node 2 --master-port {port} -m dstrain.cli evaluate {}", marks=pytest.mark.slow
        ),
        pytest.param(
            "deepspeed --master_port {port} --num_gpus 2 --module dstrain.cli evaluate {}", marks=pytest.mark.slow
        ),
    ],
)
def test_every_way_in_prints_the_same_once_and_leaves_nothing(
    way: str, tmp_path: Path, trained: Any, one: Workers
) -> None:
    folder = trained("rm")
    words = way.format(f"{folder}/run --data {folder}/eval.jsonl --step last --json", port=free_port()).split()
    done = start(words, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not way.startswith("deepspeed"):  # its launcher prints lines of its own
        assert done.stdout == line + "\n"
    alone = one(EVALUATE, folder=str(folder / "run"), data=str(folder / "eval.jsonl"))[0]
    assert numbers(json.loads(line)) == pytest.approx(numbers(alone), rel=1e-5)
    left = {path.name for path in (tmp_path / "tmp").iterdir() if path.name.startswith("dstrain-")}
    assert not left
    assert {path.name for path in tmp_path.iterdir()} == {"tmp"}


def test_another_task_reads_an_export_without_the_options_of_its_own(tmp_path: Path) -> None:
    """`--task docqa` of an export of task vlm, whose recipe has options and metrics that docqa does not know."""
    changes = {"data": {"max_length": 128}, "options": {"group_by_image": True}}
    changes["eval"] = {"metric": "token_accuracy", "best": "max"}
    run = make_run(tmp_path / "vlm", "vlm", changes)
    export_model(run, "last", tmp_path / "out")
    (tmp_path / "docqa").mkdir()
    asked = tiny_recipe("docqa", tmp_path / "docqa")["data"]["eval"]
    words = ["evaluate", tmp_path / "out", "--task", "docqa", "--data", asked, "--set", "options.dpi=72", "--json"]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "exact_match" in json.loads(result.stdout)
    (line,) = [line for line in result.stderr.splitlines() if "whose options are not used" in line]
    assert "is of task vlm, whose options are not used (group_by_image" in line
