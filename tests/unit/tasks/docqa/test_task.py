"""Task docqa: what is trained on, what is asked in an evaluation, and its adapters by default."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.batch import Batch
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import RunConfig, dump_recipe, read_recipe
from dstrain.config.schema import DatasetConfig
from dstrain.data.loading.loader import make_batch
from dstrain.data.sources.open import open_source
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import BadRecord, RecipeError, TaskError
from dstrain.models.heads import MAX_CHUNK_BYTES
from dstrain.models.params import build_param_groups
from dstrain.tasks import make_task
from dstrain.tasks.common import forward
from dstrain.tasks.common.answers import ANSWER_METRICS
from dstrain.tasks.common.generation import PromptReader
from dstrain.tasks.common.task import as_dataset
from dstrain.tasks.docqa.task import focal_cross_entropy
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.evaluate import Evaluation
from tests.tiny import tiny_recipe
from tests.vocabulary import read_jsonl, write_jsonl, write_recipe
from tests.workers import ROOT


def made(folder: Path, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    values = tiny_recipe("docqa", folder)
    for key, value in {**changes, "options": options or {}}.items():
        values[key] = {**values.get(key, {}), **value}
    return make_task(RunConfig.model_validate(values))


def text_of(task: Any, ids: Any) -> str:
    return str(task.tokenizer.decode([int(token) for token in ids]))


@pytest.mark.parametrize("assistant_only", [True, False])
def test_the_first_answer_is_trained_on_and_all_are_accepted(assistant_only: bool, tmp_path: Path) -> None:
    task = made(tmp_path, {"assistant_only_loss": assistant_only, "prompt_template": "Read. {question} Shortly:"})
    examples, records = task.examples("eval"), read_jsonl(tmp_path / "eval.jsonl")
    for example, record in zip(examples, records, strict=True):
        length = int(example["prompt_length"])
        assert f"Read. {record['question']} Shortly:" in text_of(task, example["input_ids"][:length])
        assert text_of(task, example["input_ids"][length:]).strip().startswith(record["answers"][0])
        assert example["loss_mask"][length:].all()
        assert bool(example["loss_mask"][1:length].any()) != assistant_only
        assert json.loads(bytes(example["answers"].tolist())) == record["answers"]
        assert len(example["images"]) == len(record["images"])


def test_a_tokenizer_is_trained_on_the_words_of_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one was trained on the same data with another template before."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    templates = ("{question}", "Zzyzx zzyzx. {question}")
    plain, worded = (made(tmp_path, {"prompt_template": template}).tokenizer.get_vocab() for template in templates)
    assert "zzy" not in "".join(plain)
    assert "zzy" in "".join(worded)


def test_the_prompt_of_an_evaluation_is_that_of_generate(tmp_path: Path) -> None:
    task = made(tmp_path)
    reader, generation = PromptReader(task), task.prompts.metrics
    for example, record in zip(task.examples("eval"), read_jsonl(tmp_path / "eval.jsonl"), strict=True):
        del record["answers"]
        (wanted,) = reader.encode([reader.parse(record)], [tmp_path])
        assert generation.get_prompt(example).ids == wanted.ids


def test_prompts_need_no_answers(tmp_path: Path) -> None:
    task = made(tmp_path, {"unanswerable_answer": None}, data={"max_samples": 2})
    records = [{"question": f"Page {page}?", "image": "eval-0-0.png"} for page in (1, 2, 3)]
    file = str(write_jsonl(tmp_path / "asked.jsonl", records))
    source = task.prompts.open_source(DatasetConfig(path=file))
    found = [PromptReader(task).parse(source[index]) for index in range(len(source))]
    assert [prompt.parsed.prompt[0]["content"][-7:] for prompt in found] == ["Page 1?", "Page 2?"]
    with pytest.raises(BadRecord, match="missing"):
        task.wrap_source(open_source(file), DatasetConfig(path=file))[0]


def test_accepted_answers_are_not_tokens(tmp_path: Path) -> None:
    values = tiny_recipe("docqa", tmp_path)
    record = {**read_jsonl(tmp_path / "eval.jsonl")[0], "answers": ["red", "x" * 5000]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(record) + "\n")
    examples: Any = as_dataset(make_task(RunConfig.model_validate(values)).examples("eval"))
    assert examples.sequence_lengths(torch.tensor([0]).numpy()).sequences.item() == len(examples[0]["input_ids"])
    assert examples.summarize()["longest"] == len(examples[0]["input_ids"])


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"focal_gamma": 2.0},
                                     {"label_smoothing": 0.2, "focal_gamma": 0.5}])  # fmt: skip
def test_the_loss_is_the_formula_on_all_logits(
    options: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * 320 * 3)  # three rows in a chunk
    task, padded = (made(tmp_path, dict(options), batch={"packing": packing}) for packing in (True, False))
    model = task.build_model().train()
    batch, rows = (make_batch(one.examples("train"), one.collate, [0, 1, 2, 3], 0) for one in (task, padded))
    wanted = gradient(model, plain_loss(model, rows, **options))
    loss = task.loss(model, batch)
    found = gradient(model, loss.total)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert float((found[1] - wanted[1]).norm() / wanted[1].norm()) <= 1e-6
    assert batch.weight == float(batch.tensors["loss_mask"].sum())
    assert set(loss.metrics) == {"token_accuracy"}


def plain_loss(
    model: torch.nn.Module, batch: Batch, label_smoothing: float = 0.0, focal_gamma: float = 0.0
) -> torch.Tensor:
    """Return the loss from all logits, in torch's words."""
    loss_mask = batch.tensors["loss_mask"]
    logits = forward.forward_logits(model, batch)[:, -loss_mask.shape[1] - 1 : -1][loss_mask != 0].float()
    targets = batch.tensors["input_ids"][: len(loss_mask), -loss_mask.shape[1] :][loss_mask != 0]
    smoothed = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    probability = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
    return ((1 - probability) ** focal_gamma * smoothed).sum()


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1, but it must be at least 0 and below 1"),
        ({"focal_gamma": -1}, "focal_gamma is -1, but it must be at least 0"),
        ({"prompt_template": "Answer."}, r"prompt_template must contain \{question\} once"),
        ({"max_pages": 0}, "max_pages is 0"),
        ({"dpi": 5}, "dpi is 5"),
        ({"crop": 0.9}, "crop is 0.9"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        make_task(RunConfig.model_validate({"task": "docqa", "options": options}))


@pytest.mark.parametrize("option", ["max_pages: 0", "crop: 0.9"])
def test_options_out_of_range_are_refused_without_assertions_too(option: str) -> None:
    code = "import sys; from dstrain.config import read_recipe; from dstrain.tasks import make_task; "
    code += "make_task(read_recipe(None, ['options={%s}' % sys.argv[1]], 'docqa').config)"
    done = subprocess.run([sys.executable, "-O", "-c", code, option], cwd=ROOT, capture_output=True, text=True)
    assert f"{option.replace(':', ' is')}, but" in done.stderr


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    task = made(tmp_path, model={"config": {"model_type": "llama", "vocab_size": 320, "hidden_size": 32}, "freeze": []})
    with pytest.raises(RecipeError, match=r"llama is a text-only model; task docqa needs a vision-language model"):
        task.checks.run()


@pytest.mark.parametrize(
    ("model", "rank", "lr"), [({}, 16, 2e-4), ({"lora": None}, None, 2e-5), ({"lora": {"rank": 4}}, 4, 2e-4)]
)
def test_adapters_are_trained_unless_the_recipe_writes_null(
    model: dict[str, Any], rank: int | None, lr: float, tmp_path: Path
) -> None:
    values = tiny_recipe("docqa", tmp_path)
    del values["optim"], values["model"]["lora"]
    values["model"] |= model
    file = write_recipe(tmp_path, values)
    for recipe in (
        make_task(RunConfig.model_validate(values)).recipe,
        resolve_recipe(TrainRequest(recipe=str(file))).config,
    ):
        assert (recipe.model.lora and recipe.model.lora.rank) == rank
        assert recipe.optim.lr == lr
        (tmp_path / "written.yaml").write_text(dump_recipe(recipe))
        again = make_task(read_recipe(tmp_path / "written.yaml").config).recipe
        assert (again.model.lora, again.optim.lr) == (recipe.model.lora, lr), "a written recipe names both"
    overridden = resolve_recipe(TrainRequest(recipe=str(file), overrides=["model.lora=null"])).config
    assert overridden.model.lora is None


def test_other_tasks_have_no_adapters_by_default() -> None:
    recipe = RunConfig.model_validate({"task": "vlm", "optim": {"lr": 1e-5}})
    assert make_task(recipe).recipe == recipe


def test_an_evaluation_generates_and_restores(tmp_path: Path) -> None:
    task = made(tmp_path, eval={"generate": {"max_new_tokens": 3, "samples": 5}})
    module = build_train_module(task)
    engine = TorchEngine(
        module, build_param_groups(module.model, task.recipe.optim), task.recipe.optim, torch.device("cpu")
    )
    model: Any = module.model
    config, state = model.generation_config, torch.get_rng_state()
    asked: list[int] = []
    generate = type(model).generate
    model.generate = lambda **inputs: (asked.append(len(inputs["input_ids"])), generate(model, **inputs))[1]
    found = Evaluation(task, task.examples("eval"), 2).run(engine)
    assert {*ANSWER_METRICS, "loss", "token_accuracy"} <= found.keys()
    assert sum(asked) == 5
    assert model.generation_config is config
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(engine.world, SingleProcessWorld)


def test_an_accepted_answer_counts_for_a_sample(tmp_path: Path) -> None:
    task = made(tmp_path)
    example = task.examples("eval")[0]
    second = read_jsonl(tmp_path / "eval.jsonl")[0]["answers"][1]
    assert task.prompts.metrics.score(example, f"The {second.upper()}.") == {
        "exact_match": 1.0, "relaxed_number_match": 1.0, "anls": pytest.approx(1 - 5 / (len(second) + 5)),
    }  # fmt: skip


# The loss of task docqa on tokens is the papers' formula, and its gradient is finite everywhere.


def test_label_smoothing_equals_its_formula() -> None:
    """Szegedy et al., section 7: cross entropy with 0.9 of the target's distribution and 0.1 of the uniform one."""
    log_probs = torch.log(torch.tensor([0.5, 0.25, 0.25]))
    smoothed = [0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]
    wanted = -sum(share * math.log(p) for share, p in zip(smoothed, (0.5, 0.25, 0.25), strict=True))
    found = focal_cross_entropy(log_probs[:1], log_probs.mean()[None], 0.1)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("p", "gamma", "wanted"), [(0.9, 2.0, 0.00105361), (0.1, 2.0, 1.86509), (0.5, 0.0, 0.693147)])
def test_focal_weighting_equals_its_formula(p: float, gamma: float, wanted: float) -> None:
    """Lin et al., eq. 4: -(1 - p)^gamma log p; at p = 0.9 and gamma 2 the loss is 100 times smaller."""
    assert float(focal_cross_entropy(torch.tensor(p).log(), None, 0.0, gamma)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_a_certain_token_has_a_finite_gradient(gamma: float) -> None:
    log_probs = torch.tensor([0.0, 1e-7, -1e-12, -50.0], requires_grad=True)  # rounding may give log p above 0
    loss = focal_cross_entropy(log_probs, None, 0.0, gamma)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert loss[0] == 0
