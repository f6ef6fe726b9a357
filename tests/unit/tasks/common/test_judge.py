"""Generated answers and their judge: what is asked, what is compared, and what a reward model says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, RecipeError, TaskError, UsageError
from dstrain.planner.shapes import read_properties
from dstrain.tasks import make_task
from dstrain.tasks.common.judge import JUDGE_KEY, Judge, check_generation_data, check_judge, count_wins, make_judge
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.base import ForwardEngine
from dstrain.training.evaluate import Evaluation
from tests.reward_models import export_reward_model
from tests.tiny import tiny_recipe
from tests.vision_recipes import named_recipe
from tests.vocabulary import message, read_jsonl, write_jsonl

POLITE = " Gladly: oil it."
QUESTION = "\n\nHuman: Why?\n\nAssistant:"


def test_a_tie_is_half_a_win() -> None:
    """By hand: one win, two ties (one of them of equal texts), a loss and an empty answer, and nothing to compare with."""
    rewards = [2.0, 1.0, 1.0000001, 0.0, None, 3.0]
    references: list[float | None] = [1.0, 1.0, 1.0, 0.5, 0.5, None]
    assert count_wins(rewards, references, [False, False, True, False, False, False]) == (2.0, 5)


def made(task: str, folder: Path, generate: dict[str, Any], **changes: Any) -> Any:
    values = named_recipe(task, folder)[1]
    return make_task(RunConfig.model_validate({**values, "eval": {"generate": generate}, **changes}))


def evaluate(task: Any, monkeypatch: pytest.MonkeyPatch, texts: Sequence[str]) -> tuple[dict[str, float], list[Any]]:
    """Return the row of an evaluation in which the model answers these texts, and the prompts that it has answered."""
    asked: list[Any] = []

    def answer(model: Any, prompts: Sequence[Any], *more: Any) -> list[list[int]]:
        asked.extend(prompts)
        start = len(asked) - len(prompts)
        return [task.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[start : len(asked)]]

    monkeypatch.setattr("dstrain.training.evaluate.generate_answers", answer)
    engine = ForwardEngine(build_train_module(task), {}, SingleProcessWorld())
    examples = task.examples("eval")
    check_generation_data(task, examples)
    return Evaluation(task, examples, 2).run(engine), asked


def score_by_hand(judge: Path, text: str) -> float:
    """Return the score that transformers gives to a text and an EOS."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = (auto.from_pretrained(judge) for auto in (AutoModelForSequenceClassification, AutoTokenizer))
    ids = [*tokenizer(text)["input_ids"]]
    ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
    with torch.no_grad():
        return float(model.eval()(input_ids=torch.tensor([ids])).logits)


RECORDS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"messages": [message("user", "Why?"), message("assistant", "Oil it.")]},
        {"messages": [message("user", "Why?"), message("assistant", "Test it.")]},
    ],
    "dpo": [
        {"prompt": QUESTION, "chosen": " Oil it.", "rejected": " No idea."},
        {"prompt": QUESTION, "chosen": " Test it.", "rejected": " Go away."},
    ],
    "kto": [
        {"prompt": QUESTION, "completion": " Oil it.", "label": True},
        {"prompt": QUESTION, "completion": " No idea.", "label": False},
        {"prompt": QUESTION, "completion": " Test it.", "label": True},
    ],
    "distill": [
        {"messages": [message("user", "Why?"), message("assistant", "Oil it.")]},
        {"messages": [message("user", "Why?"), message("assistant", "Test it.")]},
    ],
}


@pytest.mark.parametrize("task", RECORDS)
def test_answers_are_judged_against_those_of_the_data(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge has a tokenizer of its own, and its scores are those of transformers; a text that is equal is a tie."""
    judge = export_reward_model(tmp_path)
    generate = {"metrics": ["exact_match"], "reward_model": str(judge)}
    policy = made(task, tmp_path, generate)
    write_jsonl(tmp_path / "eval.jsonl", RECORDS[task])
    row, asked = evaluate(policy, monkeypatch, [POLITE, " Test it."])
    assert len(asked) == 2, "not to an answer that is not wanted"
    vocabularies = [one.tokenizer.get_vocab() for one in (policy, make_judge(policy).task)]  # type: ignore[union-attr]
    assert (vocabularies[0] == vocabularies[1]) == (task == "dpo"), "dpo and rm have the same training texts here"
    polite, oil, test = (score_by_hand(judge, f"{QUESTION}{text}") for text in (POLITE, " Oil it.", " Test it."))
    assert row["reward"] == pytest.approx((polite + test) / 2, abs=1e-5)
    assert row["win_rate"] == ((polite > oil) + 0.5) / 2
    assert row["exact_match"] == 0.5


def test_an_empty_answer_loses_and_has_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = export_reward_model(tmp_path)
    policy = made("sft", tmp_path, {"reward_model": str(judge)})
    write_jsonl(tmp_path / "eval.jsonl", RECORDS["sft"])
    row, _ = evaluate(policy, monkeypatch, [" ", " Test it."])
    assert row["reward"] == pytest.approx(score_by_hand(judge, f"{QUESTION} Test it."), abs=1e-5)
    assert row["win_rate"] == 0.25


def test_the_last_answer_of_a_conversation_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [
        message("user", "Why?"),
        message("assistant", "So."),
        message("user", "How?"),
        message("assistant", "Oil it."),
    ]
    policy = made("sft", tmp_path, {"metrics": ["exact_match"], "samples": 1})
    write_jsonl(tmp_path / "eval.jsonl", [{"messages": turns}] * 3)
    row, asked = evaluate(policy, monkeypatch, [" oil it"])
    assert [policy.tokenizer.decode(prompt.ids).rpartition("Human:")[2] for prompt in asked] == [" How?\n\nAssistant:"]
    assert row["exact_match"] == 1
    assert "reward" not in row


def test_a_judge_of_several_objectives_gives_their_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = export_reward_model(tmp_path)
    recipe = judge / "dstrain_recipe.yaml"
    options = "{objectives: [helpful, brief], objective_weights: [3.0, 1.0]}"
    recipe.write_text(recipe.read_text().replace("options: {}", f"options: {options}"))
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=2, ignore_mismatched_sizes=True)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(judge)
    policy = made("sft", tmp_path, {"reward_model": str(judge)})
    write_jsonl(tmp_path / "eval.jsonl", RECORDS["sft"][:1])
    row, _ = evaluate(policy, monkeypatch, [POLITE])
    tokenizer = AutoTokenizer.from_pretrained(judge)
    ids = [*tokenizer(f"{QUESTION}{POLITE}")["input_ids"]]
    ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
    with torch.no_grad():
        helpful, brief = model.eval()(input_ids=torch.tensor([ids])).logits[0].tolist()
    assert row["reward"] == pytest.approx((3 * helpful + brief) / 4, abs=1e-5)


def test_a_judge_of_images_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = export_reward_model(tmp_path, name="rm, with images")
    policy = made("vlm", tmp_path, {"reward_model": str(judge), "samples": 3, "metrics": ["anls"]})
    row, asked = evaluate(policy, monkeypatch, [POLITE] * 3)
    assert sum(len(prompt.images) for prompt in asked) == 0 + 1 + 2
    found = read_jsonl(tmp_path / "eval.jsonl")[:3]
    answered = [{**one, "messages": [*one["messages"][:-1], message("assistant", POLITE.strip())]} for one in found]
    write_jsonl(tmp_path / "answered.jsonl", answered)
    from dstrain.commands.score import ScoreJob
    from dstrain.commands.trained_model import ModelSelector
    from dstrain.ds_config import Device

    job = ScoreJob(selector=ModelSelector(folder=judge), data=str(tmp_path / "answered.jsonl"), out="-")
    scored: Any = job.run(job.prepare(1, Device("cpu", True)), SingleProcessWorld())
    wanted = [one["score"] for one in scored["rows"]]
    assert row["reward"] == pytest.approx(sum(wanted) / 3, abs=1e-5)
    assert wanted[1] != pytest.approx(wanted[0])


def test_images_need_a_judge_that_takes_them(tmp_path: Path) -> None:
    policy = made("vlm", tmp_path, {"reward_model": str(export_reward_model(tmp_path))})
    with pytest.raises(RecipeError, match=rf"{JUDGE_KEY}: is a text-only reward model, and the records have images"):
        check_generation_data(policy, policy.examples("eval"))


@pytest.mark.parametrize(
    ("task", "values", "words"),
    [
        ("rm", {"metrics": ["anls"]}, "eval.generate: is set, but task rm generates no text; leave it out"),
        ("prm", {"metrics": ["anls"]}, "task prm generates no text"),
        ("protein", {"metrics": ["anls"]}, "task protein generates no text"),
        ("sft", {"metrics": ["anl"]}, "eval.generate.metrics: 'anl' is not a metric .*did you mean 'anls'"),
        ("sft", {"samples": 4}, "names neither metrics nor a reward_model"),
        ("vlm", {"metrics": ["exact_match"]}, "'exact_match' is a metric of task vlm already"),
        ("temporal", {"reward_model": "rm"}, "cannot read a series"),
    ],
)
def test_what_a_task_does_not_do_is_refused(task: str, values: dict[str, Any], words: str) -> None:
    recipe = {"task": task, "data": {"eval": "eval.jsonl"}, "eval": {"generate": values}}
    with pytest.raises(TaskError, match=words):
        make_task(RunConfig.model_validate(recipe | ({"options": {"stage": "sft"}} if task == "temporal" else {})))


@pytest.mark.parametrize(
    ("task", "values", "metric", "is_known"),
    [
        ("sft", {"metrics": ["anls"]}, "anls", True),
        ("sft", {"metrics": ["anls"]}, "reward", False),
        ("dpo", {"reward_model": "rm"}, "win_rate", True),
        ("kto", None, "win_rate", False),
        ("docqa", None, "anls", True),
        ("docqa", {"metrics": ["exact_match"]}, "anls", False),
        ("vlm", {"metrics": ["anls"]}, "exact_match", True),
        ("temporal", {"metrics": ["anls"]}, "pattern_accuracy", False),
    ],
)
def test_the_best_checkpoint_is_chosen_by_a_metric_that_there_is(
    task: str, values: Any, metric: str, is_known: bool
) -> None:
    recipe = {"task": task, "data": {"eval": "eval.jsonl"}, "eval": {"generate": values, "metric": metric}}
    if is_known:
        assert make_task(RunConfig.model_validate(recipe)).recipe.eval.metric == metric
        return
    with pytest.raises(TaskError, match=f"eval.metric: '{metric}' is not a metric of task {task}"):
        make_task(RunConfig.model_validate(recipe))


def test_nothing_is_generated_without_held_out_data(tmp_path: Path) -> None:
    from dstrain.config import read_recipe

    (tmp_path / "recipe.yaml").write_text("task: sft\neval: {generate: {metrics: [anls]}}\n")
    with pytest.raises(UsageError, match=r"eval.generate.*no data is held out; set data.eval or data.eval_fraction"):
        read_recipe(tmp_path / "recipe.yaml")
    policy = made("sft", tmp_path, {"metrics": ["anls"]})
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": "Only a text."}) + "\n")
    with pytest.raises(DataError, match=r"no record has a prompt and a right answer, which eval.generate needs"):
        check_generation_data(policy, policy.examples("eval"))


def test_a_folder_that_is_no_reward_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(RecipeError) as found:
            check_judge(made("sft", tmp_path, {"reward_model": str(folder)}))
        return str(found.value)

    assert "is not a folder" in refused(tmp_path / "nowhere")
    assert "holds no dstrain_recipe.yaml" in refused(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("task: rm\n")
    assert "is a run folder; export it: dstrain export" in refused(tmp_path / "run")
    judge = export_reward_model(tmp_path)
    recipe = judge / "dstrain_recipe.yaml"
    recipe.write_text(recipe.read_text().replace("task: rm", "task: sft"))
    assert "is the export of task sft; give a folder" in refused(judge)


def test_the_plan_counts_the_judge(tmp_path: Path) -> None:
    policy = made("sft", tmp_path, {"reward_model": str(export_reward_model(tmp_path))})
    assert [model.path for model in read_properties(policy.recipe).reward_models] == [str(tmp_path / "harmless")]


def test_limits_of_lengths_are_those_of_the_judge(tmp_path: Path) -> None:
    """Not of the policy, whose tokens are others."""
    judge = Judge(folder=str(export_reward_model(tmp_path)), policy=made("sft", tmp_path, {"metrics": ["anls"]}))
    assert judge.task.recipe.data.max_length == tiny_recipe("rm", tmp_path)["data"]["max_length"]
    assert judge.task.recipe.data.train == []


def test_an_answer_needs_room_in_the_positions(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    policy = made("sft", tmp_path, {"metrics": ["anls"], "max_new_tokens": 20}, model={"config": config})
    with pytest.raises(RecipeError, match=r"with 20 generated tokens is 68, and the model has 64 positions"):
        policy.checks.run()
