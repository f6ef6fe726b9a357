"""Supervised fine-tuning: the loss is transformers' own, summed; and no more memory than the logits take."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.errors import DataError, TaskError
from dstrain.models.heads import MAX_CHUNK_BYTES
from dstrain.tasks import make_task
from dstrain.tasks.common.forward import score_targets
from tests.tiny import tiny_recipe


def task(folder: Path, **sections: Any) -> Any:
    recipe = tiny_recipe("sft", folder)
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    return make_task(RunConfig.model_validate(recipe))


def labels_of(made: Any, examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) ids and transformers' labels, -100 where nothing is learnt, made without the task's own collate."""
    length = max(len(example["input_ids"]) for example in examples)
    ids, labels = [], []
    for example in examples:
        rest = length - len(example["input_ids"])
        learnt = [
            int(token) if on else -100 for token, on in zip(example["input_ids"], example["loss_mask"], strict=True)
        ]
        ids.append([*example["input_ids"].tolist(), *[made.tokenizer.pad_token_id] * rest])
        labels.append([*learnt, *[-100] * rest])
    return torch.tensor(ids), torch.tensor(labels)


@pytest.mark.parametrize("assistant_only", [True, False])
def test_the_loss_is_transformers_own_mean_times_the_number_of_tokens(assistant_only: bool, tmp_path: Path) -> None:
    made = task(tmp_path, options={"assistant_only_loss": assistant_only})
    model, examples = made.build_model().eval().double(), made.examples("train")
    rows = [examples[index] for index in range(12)]
    ids, labels = labels_of(made, rows)
    batch = made.collate(rows)
    with torch.no_grad():
        found = made.loss(model, batch)
        theirs = model(
            input_ids=ids, attention_mask=(labels != -100) | (ids != made.tokenizer.pad_token_id), labels=labels
        )
    count = int((labels != -100).sum())
    assert batch.weight == count
    assert float(found.total) == pytest.approx(float(theirs.loss) * count, rel=1e-6)
    right = (theirs.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()
    assert float(found.metrics["token_accuracy"]) == float(right)


def test_what_is_learnt_are_the_answers(tmp_path: Path) -> None:
    made = task(tmp_path, data={"max_length": 200})
    example = made.examples("train")[0]
    learnt = example["input_ids"][example["loss_mask"] == 1]
    record = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])["messages"]
    assert made.tokenizer.decode(learnt) == f" {record[1]['content']} {record[3]['content']}</s>"


def test_a_batch_asks_for_no_more_logits_than_it_needs(tmp_path: Path) -> None:
    made = task(tmp_path, batch={"packing": False})
    examples = made.examples("train")
    batch = made.collate([examples[index] for index in (1, 0, 2)])
    first = min(list(examples[index]["loss_mask"]).index(1) for index in (1, 0, 2))
    ids, loss_mask = batch.tensors["input_ids"], batch.tensors["loss_mask"]
    assert loss_mask.shape == (3, ids.shape[1] - first)
    assert loss_mask[:, 0].any()
    assert int(loss_mask.sum()) == batch.weight
    assert batch.tokens == int(batch.tensors["attention_mask"].sum())
    asked = []
    model = made.build_model().eval()
    forward = type(model).forward
    model.forward = lambda **inputs: (asked.append(inputs["logits_to_keep"]), forward(model, **inputs))[1]
    made.loss(model, batch)
    assert asked == [loss_mask.shape[1] + 1]


class GivenLogits(torch.nn.Module):
    """A model without a head that could be called separately."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)


def score_tokens(
    logits: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `score_targets` of targets (B, K) under logits (B, K, V)."""
    ids = torch.nn.functional.pad(targets, (1, 0))  # the first token is never a target
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": loss_mask}
    model = GivenLogits(torch.nn.functional.pad(logits, (0, 0, 0, 1)))  # those of the last token predict nothing
    batch = Batch(tensors=tensors, weight=1.0, samples=(), tokens=ids.numel())
    return score_targets(model, batch)


def test_tokens_to_learn_are_scored_as_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]]))
    targets, loss_mask = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 0]])
    log_probs, right = score_tokens(logits, targets, loss_mask)
    assert float(log_probs.sum()) == pytest.approx(float(torch.log(torch.tensor(0.5 * 0.2))), rel=1e-6)
    assert int(right.sum()) == 1, "the first is the likeliest, the second is not, the third is not learnt"


def test_what_is_not_learnt_has_no_gradient() -> None:
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss_mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])
    score_tokens(logits, torch.randint(7, (2, 5)), loss_mask)[0].sum().backward()
    assert logits.grad is not None
    assert ((logits.grad != 0).any(-1) == (loss_mask == 1)).all()


def test_learning_keeps_the_logits_once_and_in_their_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """An fp32 copy of them would be twice their size, and one for the metric as much again."""
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * 50 * 3)  # three rows at a time
    logits = torch.randn(1, 64, 50, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        log_probs, _ = score_tokens(logits, torch.randint(50, (1, 64)), torch.ones(1, 64, dtype=torch.long))
    assert log_probs.dtype == torch.float32
    assert sum(kept.values()) < 1.5 * logits.untyped_storage().nbytes()


def test_scoring_in_chunks_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(3, 16, 50), torch.randint(50, (3, 16))
    learnt = torch.randint(2, (3, 16))
    found = []
    for size in (2**20, 4 * 50 * 5):
        monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", size)
        own = logits.clone().requires_grad_()
        log_probs, right = score_tokens(own, targets, learnt)
        total = log_probs.sum()
        total.backward()
        found.append((float(total.detach()), int(right.sum()), own.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == found[1][1]
    assert torch.allclose(found[0][2], found[1][2])


def test_preferences_teach_their_chosen_answers(tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    tiny_recipe("rm", tmp_path / "pairs")
    made = task(tmp_path, data={"train": str(tmp_path / "pairs/train.jsonl")})
    example = made.examples("train")[3]
    chosen = json.loads((tmp_path / "pairs/train.jsonl").read_text().splitlines()[3])["chosen"]
    learnt = made.tokenizer.decode(example["input_ids"][example["loss_mask"] == 1])
    assert chosen.endswith(learnt.removesuffix("</s>"))
    assert learnt.startswith(" Gladly")


def test_a_tokenizer_of_other_texts_is_another(tmp_path: Path) -> None:
    """On the same file rm trains one on rejected answers too: whichever came first would stay in the cache for both."""
    files = {"data": {"train": str(tmp_path / "pairs.jsonl")}}
    row = {"prompt": "Which one?", "chosen": "this", "rejected": "thatthatthat thatthatthat"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    rm = tiny_recipe("rm", tmp_path)
    pairs: Any = make_task(RunConfig.model_validate(rm | {"data": rm["data"] | files["data"]}))
    made = task(tmp_path, **files)
    assert "thatthatthat" in "".join(pairs.tokenizer.get_vocab())
    assert "thatthatthat" not in "".join(made.tokenizer.get_vocab())


def test_bad_records_are_refused_before_training(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": bool(i % 2)}
            for i in range(6)]  # fmt: skip
    (tmp_path / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(tmp_path / "kto.jsonl")}
    with pytest.raises(DataError, match=r"3 of 6 records .50.0%. cannot be used(.|\n)*'label' is false"):
        task(tmp_path, data=files).examples("train")
    assert len(task(tmp_path, data=files | {"on_error": "skip"}).examples("train")) == 3


def test_another_option_is_another_cache(tmp_path: Path) -> None:
    sums = {option: int(task(tmp_path, options={"assistant_only_loss": option}).examples("train")[0]["loss_mask"].sum())
            for option in (True, False)}  # fmt: skip
    assert sums[False] > sums[True] > 0


def test_a_wrong_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="assistant_only_loss"):
        task(tmp_path, options={"assistant_only": True})
    with pytest.raises(TaskError, match="assistant_only_loss"):
        task(tmp_path, options={"assistant_only_loss": "often"})
