"""Situations of public reports that stay right; docs/measurements/public-cases.md lists them with what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.batch import Batch
from dstrain.data.loading.loader import make_batch
from dstrain.data.prepare import describe_examples
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, RecipeError
from dstrain.models.params import build_param_groups
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs
from tests.contract.public_cases import CASES, GLM, MISTRAL, PAIR, SPACED, TINY, Case, byte_tokenizer, make, read_marked
from tests.parity.cases import move
from tests.vocabulary import message

pytestmark = pytest.mark.usefixtures("fresh_cache")

GOOD: dict[str, dict[str, Any]] = {
    "sft": {"prompt": "a", "completion": "b"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
}
SGD = {"name": "sgd", "lr": 1000.0, "clip": 0.0}


def learnt(task: str, example: Any) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each text of an example, and 1 where they are learnt."""
    if task == "dpo":
        start = int(example["prompt_length"])
        texts = [example["chosen"], example["rejected"]]
        return [([*map(int, ids)], [int(at >= start) for at in range(len(ids))]) for ids in texts]
    names = {"sft": ("input_ids", "loss_mask"), "kto": ("answer", "answer_loss_mask")}[task]
    ids, mask = ([*map(int, example[name])] for name in names)
    return [(ids, mask)]


@pytest.mark.parametrize("name", CASES)
def test_a_record_becomes_the_tokens_that_a_report_asks_for(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    records = [case.record, *[GOOD[case.task]] * 3]
    made = make(tmp_path, case.task, records, byte_tokenizer(case.template, **case.tokenizer), **case.sections)
    if case.reason:
        with pytest.raises(DataError, match=rf"train\.jsonl:1: .*{case.reason}"):
            made.examples("train")
        return
    examples = made.examples("train")
    assert learnt(case.task, examples[0]) == [read_marked(text) for text in case.wanted]
    assert not case.said or any(case.said in line for line in describe_examples(examples.report))


ANSWERS = [{"prompt": f"{'ask ' * at}it: ", "completion": "so " * count} for at, count in enumerate((1, 40, 2, 13, 1, 7, 3, 25))]
"""Their lengths differ much: a mean of means is far from the mean over tokens."""


def engine_of(made: Any, moved: bool = True) -> TorchEngine:
    objective = build_train_module(made)
    if moved:
        move(objective.model)
    return TorchEngine(objective, build_param_groups(objective.model, made.recipe.optim), made.recipe.optim, torch.device("cpu"))


def batches_of(made: Any, chunks: Sequence[Sequence[int]]) -> list[Batch]:
    job = OutputsJob(task=made, ds_config={"zero_optimization": {"stage": 0}}, micro_batch_size=4, world=SingleProcessWorld())
    (examples,) = add_frozen_outputs(job, [made.examples("train")])
    assert examples is not None
    return [make_batch(examples, made.collate, [*chunk], 0) for chunk in chunks]


def rows_of(made: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and labels of each example, (1, L) each, -100 where nothing is learnt."""
    rows = []
    for example in made.examples("train"):
        ids = torch.tensor([[*map(int, example["input_ids"])]])
        rows.append((ids, ids.masked_fill(torch.tensor([[*map(int, example["loss_mask"])]]) == 0, -100)))
    return rows


def take_step(engine: TorchEngine, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor], float]:
    """Return loss, gradients by name (with SGD), and the norm of a step."""
    model, lr = engine.train_module.model, engine.lr if hasattr(engine, "lr") else 1000.0
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    result = engine.step(batches, lr=lr)
    after = dict(model.named_parameters())
    return float(result.loss) / result.weight, {name: (before[name] - after[name].detach()) / lr for name in before}, result.grad_norm


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    square = lambda values: float(sum(value.double().square().sum() for value in values))  # noqa: E731
    return (square(found[name] - wanted[name] for name in wanted) / square(wanted.values())) ** 0.5


SPLITS = {"one": [range(8)], "two": [range(4), range(4, 8)], "eight": [[at] for at in range(8)]}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_a_step_is_the_mean_over_its_tokens_however_it_is_split(split: str, packing: bool, tmp_path: Path) -> None:
    """transformers#37766, #35438 and #34242, mlx-lm#1697, trl#3728; packed: nanoVLM#201, LlamaFactory#7318,
    axolotl#1375, unsloth#1207, torchtune#2613."""
    made = make(tmp_path, "sft", ANSWERS, byte_tokenizer(), optim=SGD, batch={"total": 8, "micro": 8, "packing": packing})
    engine = engine_of(made)
    model, rows = engine.train_module.model, rows_of(made)
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in rows)
    assert count == sum(len(record["completion"]) + 1 for record in ANSWERS)
    total = sum(model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != -100).sum() for ids, labels in rows)
    (total / count).backward()
    wanted = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    batches = batches_of(made, SPLITS[split])
    assert batches[0].is_packed == packing
    loss, gradients, norm = take_step(engine, batches)
    assert loss == pytest.approx(float(total) / count, rel=1e-6)
    assert distance(gradients, wanted) < 2e-6
    assert norm == pytest.approx(sum(float(one.square().sum()) for one in wanted.values()) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_a_step_is_clipped_once_and_its_norm_is_that_before(split: str, tmp_path: Path) -> None:
    """transformers#1563 and #986 (clipped after each micro-batch); DeepSpeed#6767 and #7220 (the norm of the log is above
    the limit: it is that before clipping)."""
    made = make(tmp_path, "sft", ANSWERS, byte_tokenizer(), optim={**SGD, "clip": 0.01}, batch={"total": 8, "micro": 8})
    _, gradients, norm = take_step(engine_of(made), batches_of(made, SPLITS[split]))
    assert norm > 0.1
    assert sum(float(one.double().square().sum()) for one in gradients.values()) ** 0.5 == pytest.approx(0.01, rel=1e-3)


def teacher(folder: Path, vocab_size: int) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, "vocab_size": vocab_size}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(str(folder / "teacher"))
    byte_tokenizer().save_pretrained(str(folder / "teacher"))
    return str(folder / "teacher")


@pytest.mark.parametrize("vocab_size", [272, 320])
@pytest.mark.parametrize("split", SPLITS)
def test_a_student_learns_its_teacher_however_a_step_is_split(split: str, vocab_size: int, tmp_path: Path) -> None:
    """Soup#720 and #932 (scaled with accumulation); torchtune#2119, Model-Optimizer#2489, trl#3028 and #6252 (a teacher whose
    embeddings have more rows than the student's): the divergence over all tokens, by hand."""
    from transformers import AutoModelForCausalLM

    options = {"teacher": teacher(tmp_path, vocab_size), "top_k": 272, "ce_weight": 0.25, "precompute_ref_log_probs": True}
    made = make(tmp_path, "distill", ANSWERS, byte_tokenizer(), options=options, optim=SGD, batch={"total": 8, "micro": 8})
    made.checks.run()
    engine, guide = engine_of(made), AutoModelForCausalLM.from_pretrained(options["teacher"]).eval()
    wanted, count = 0.0, 0
    for ids, labels in rows_of(made):
        learnt_at = labels[0, 1:] != -100
        with torch.no_grad():
            logits, theirs = engine.train_module.model(input_ids=ids).logits[0, :-1][learnt_at], guide(input_ids=ids).logits[0, :-1][learnt_at]
        own, p = logits.double().log_softmax(-1), theirs.double().softmax(-1)
        # Tokens that the student does not have are one class, which it gives no probability: 272 classes in all here.
        p = p[:, :272] if vocab_size == 272 else p[:, :272] / p[:, :272].sum(-1, keepdim=True)
        wanted += 0.75 * float((p * (p.log() - own)).sum()) - 0.25 * float(own.gather(-1, labels[0, 1:][learnt_at, None]).sum())
        count += int(learnt_at.sum())
    loss, _, _ = take_step(engine, batches_of(made, SPLITS[split]))
    assert loss == pytest.approx(wanted / count, rel=1e-4)
