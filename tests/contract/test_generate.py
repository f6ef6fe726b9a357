"""What a policy answers does not depend on who sits beside whom, nor on how many processes write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.generate import GenerateJob, show_answers
from dstrain.commands.run_job import JobResult
from dstrain.commands.trained_model import ModelSelector
from dstrain.data.formats.answers import read_prompt_answers
from tests.contract.test_evaluate import start
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, message, write_recipe
from tests.workers import Workers

GENERATE = "tests.contract.export_cases:generate"
FEW: dict[str, Any] = {"max_new_tokens": 60, "batch": 2}
SETS = ["data.max_samples=5"]
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("sft", {"ds_config": "zero2"}, {}),
    "dpo, tied, adapters": ("dpo", {"ds_config": "zero2"}, {"lora": {"rank": 8}}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, one: Workers) -> Any:
    """The folder of a run that has learnt to end its answers, with its data beside it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("run")
            task, more, model = RUNS[name]
            values = tiny_recipe(task, folder) | more | {"steps": 80, "optim": {"lr": 1e-2}}
            values["batch"] = {"total": 8, "micro": 8}
            values["data"] |= {"max_length": 120}  # long enough for every answer to end
            values["model"]["config"] |= {"tie_word_embeddings": "tied" in name, "max_position_embeddings": 128}
            values["model"] |= model
            write_recipe(folder, values)
            one(RUN, recipe=str(folder / "recipe.yaml"), run_dir=str(folder / "run"))
            made[name] = folder
        return made[name]

    return of


def asked(folder: Path, **sampling: Any) -> dict[str, Any]:
    return {"folder": str(folder / "run"), "data": str(folder / "eval.jsonl"), "sets": SETS, "sampling": FEW | sampling}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "dpo" in name else name for name in RUNS]
)
def test_answers_do_not_depend_on_the_processes(name: str, trained: Any, one: Workers, two: Workers) -> None:
    folder = trained(name)
    alone = one(GENERATE, **asked(folder))[0]
    assert len(alone) == 5
    assert all("Human:" in row["prompt"] for row in alone), "in the file's order, as in training"
    for index, row in enumerate(alone):
        told = json.loads((folder / "eval.jsonl").read_text().splitlines()[index])
        text = told["chosen"] if "chosen" in told else told["messages"][-2]["content"]
        assert text[: len("\n\nHuman: How do I mend the kettle")].strip() in row["prompt"]
    for hold in (None, "zero3"):
        for found in two(GENERATE, **asked(folder), ds_config=hold):
            assert found == alone, hold
    if name == "sft":
        assert len({row["tokens"] for row in alone}) > 1, "answers end where they end"
        assert any(row["tokens"] < 60 for row in alone)


def test_neighbours_and_padding_change_no_answer(trained: Any, one: Workers) -> None:
    folder = trained("sft")
    together = one(GENERATE, **asked(folder, batch=5))[0]
    assert together == one(GENERATE, **asked(folder, batch=1))[0]
    assert one("tests.contract.export_cases:answer_alone", folder=str(folder / "run"), rows=together, most=60)[0] == [
        row["answer"] for row in together
    ], "transformers alone, one prompt at a time"


def test_draws_depend_on_the_seed_alone(trained: Any, one: Workers, two: Workers) -> None:
    folder = trained("sft")
    drawn = asked(folder, temperature=1.5, top_p=0.95)
    alone = one(GENERATE, **drawn)[0]
    for hold in (None, "zero3"):
        assert two(GENERATE, **drawn, ds_config=hold)[0] == alone, hold
    assert one(GENERATE, **asked(folder, temperature=1.5, top_p=0.95, seed=1))[0] != alone


def test_a_record_that_asks_nothing_is_left_out_or_refused(trained: Any, tmp_path: Path, one: Workers) -> None:
    folder = trained("sft")
    (tmp_path / "asked.jsonl").write_text('{"prompt": "hello"}\n{"prompt": ""}\n{"question": "why?"}\n')
    arguments = asked(folder) | {"data": str(tmp_path / "asked.jsonl")}
    rows = one(GENERATE, **arguments | {"sets": ["data.on_error=skip"]})[0]
    assert [row["prompt"] for row in rows] == ["hello", "\n\nHuman: why?\n\nAssistant:"]
    with pytest.raises(AssertionError, match="1 of 3 records"):
        one(GENERATE, **arguments | {"sets": []})


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "give --prompt TEXT, or --data FILE"),
        (["--prompt", " "], "--prompt is empty; write a prompt"),
        (["--prompt", "hi", "--task", "rm"], "this model scores and does not generate text; `dstrain evaluate`"),
        (["--prompt", "hi", "--task", str(Path(__file__).with_name("tiny.py"))], "does not generate text"),
        (["--data", "nowhere.jsonl"], "there is no such file"),
        (["--prompt", "hi", "--temperature", "-1"], "temperature"),
        (["--prompt", "hi", "--top-p", "0"], "top-p"),
        (["--prompt", "hi", "--num-samples", "2"], "without a temperature all answers are equal; add --temperature 1"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_starts(
    words: list[str], wanted: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = words if "--task" in words else [*words, "--task", "sft"]
    result = invoke("generate", str(tmp_path), *words, "--num-gpus", "2")
    assert result.exit_code == 2
    assert wanted in result.output


def test_an_answer_needs_room(trained: Any) -> None:
    result = invoke("generate", str(trained("sft") / "run"), "--prompt", "hi", "--max-new-tokens", "128")
    assert result.exit_code == 2
    assert "the model has 128 positions, prompt included" in result.output


def test_a_worker_is_told_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("dstrain.commands.run_job.run_job", lambda *args: told.append(args) or JobResult(0))
    prompts = ["--prompt", "\n\nHuman: 'hi'\n\nAssistant:", "--prompt", "--dashes"]
    sampling = ["--max_new_tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3", "--batch", "2"]
    sampling += ["--num-samples", "4"]
    assert invoke("generate", str(tmp_path), *prompts, *sampling, "--step", "last").exit_code == 0
    first: GenerateJob = told[0][0]
    assert invoke(*first.to_argv()).exit_code == 0
    assert told[1][0] == first
    assert first.selector == ModelSelector(folder=tmp_path, step="last")
    wanted = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "batch": 2, "num_samples": 4}
    assert first.sampling == wanted


def test_several_answers_to_a_prompt_are_different_and_ready_to_be_scored(
    trained: Any, one: Workers, two: Workers
) -> None:
    folder = trained("sft")
    few = asked(folder, max_new_tokens=8, num_samples=3, temperature=2.0) | {"sets": ["data.max_samples=2"]}
    rows = one(GENERATE, **few)[0]
    assert len(rows) == 2
    for row in rows:
        parsed = read_prompt_answers(row)
        assert (parsed.form, parsed.prompt, len(parsed.answers)) == ("list", row["prompt"], 3)
        assert len(set(row["completions"])) > 1
        assert len(row["tokens"]) == 3
    assert two(GENERATE, **few)[0] == rows
    assert show_answers(rows, False).count("--- answer") == 6


def test_answers_are_scored_with_the_tools_of_their_prompt(trained: Any, tmp_path: Path, one: Workers) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    asking = {"messages": [message("user", "Rain?")], "tools": tools}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asking) + "\n")
    (tmp_path / "template").write_text(
        "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    few = asked(trained("sft"), max_new_tokens=4, num_samples=2, temperature=2.0)
    few |= {"data": str(tmp_path / "asked.jsonl"), "sets": [f"model.chat_template={tmp_path}/template"]}
    (row,) = one(GENERATE, **few)[0]
    assert [*read_prompt_answers(row).tools] == tools


def test_answers_and_prompts_that_are_cut_off_are_told(trained: Any) -> None:
    words = f"generate {trained('sft')}/run --step last --prompt How_do_I_mend_the_pump? --json --max-new-tokens"
    told = invoke(*words.split(), "1", "--set", "data.max_prompt_length=2")
    assert told.exit_code == 0, told.output
    assert "1 of 1 answers are cut off after --max-new-tokens 1" in told.stderr
    assert "1 of 1 prompts have more than 2 tokens, and the model sees the last 2 only" in told.stderr
    assert "1 of 1" not in invoke(*words.split(), "60").stderr


def test_answers_are_shown_for_people_or_for_programs() -> None:
    rows = [{"prompt": "\n\nHuman: hi\n\nAssistant:", "answer": " Hello.", "tokens": 3}]
    assert json.loads(show_answers(rows, True)) == rows[0]
    assert show_answers(rows, False).splitlines()[-2:] == ["--- answer, 3 tokens", "Hello."]


@pytest.mark.slow
def test_the_command_writes_in_shards_with_two_processes(tmp_path: Path, trained: Any, one: Workers) -> None:
    folder = trained("sft")
    words = (
        f"dstrain generate {folder}/run --data {folder}/eval.jsonl --step last --num-gpus 2 --json --ds-config zero3"
    )
    more = "--set data.max_samples=3 --max-new-tokens 8 --batch 2"
    done = start([*words.split(), *more.split()], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    few = asked(folder, max_new_tokens=8) | {"sets": ["data.max_samples=3"]}
    assert [json.loads(line) for line in done.stdout.splitlines()] == one(GENERATE, **few)[0]
