"""Reward models: the loss as its papers write it, and one position that training and export both read."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.errors import TaskError
from dstrain.tasks import make_task
from dstrain.tasks.rm import NUM_BINS, bradley_terry, calibration_sums
from tests.tiny import tiny_recipe
from tests.vocabulary import sigmoid

CHOSEN, REJECTED = torch.tensor([1.5, -0.25]), torch.tensor([0.5, 1.0])


def expect(found: torch.Tensor, wanted: list[float]) -> None:
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)


def test_bradley_terry_equals_its_formula() -> None:
    expect(bradley_terry(CHOSEN, REJECTED), [-math.log(sigmoid(1.0)), -math.log(sigmoid(-1.25))])


def test_a_margin_asks_for_more() -> None:
    margin = torch.tensor([0.5, 0.0])
    expect(bradley_terry(CHOSEN, REJECTED, margin), [-math.log(sigmoid(0.5)), -math.log(sigmoid(-1.25))])


def test_centring_holds_the_sum_near_zero() -> None:
    plain = bradley_terry(CHOSEN, REJECTED).tolist()
    expect(bradley_terry(CHOSEN, REJECTED, center=0.01), [plain[0] + 0.01 * 2.0**2, plain[1] + 0.01 * 0.75**2])


def test_label_smoothing_takes_some_pairs_for_flipped() -> None:
    wanted = [-0.9 * math.log(sigmoid(d)) - 0.1 * math.log(sigmoid(-d)) for d in (1.0, -1.25)]
    expect(bradley_terry(CHOSEN, REJECTED, label_smoothing=0.1), wanted)


def task(folder: Path, **sections: Any) -> Any:
    recipe = tiny_recipe("rm", folder)
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    return make_task(RunConfig.model_validate(recipe))


def test_padding_does_not_change_a_score(tmp_path: Path) -> None:
    made = task(tmp_path)
    model, examples = made.build_model().eval(), made.examples("train")
    with torch.no_grad():
        together = made.scores(model, made.collate([examples[i] for i in range(8)]))
        alone = torch.cat([made.scores(model, made.collate([examples[i]])) for i in range(8)])
    expect(together[:8], alone[0::2].tolist())
    expect(together[8:], alone[1::2].tolist())


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_training_and_export_read_the_same_position(pad_is_eos: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    first = task(tmp_path)
    tokenizer = first.tokenizer
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    made = task(tmp_path, model={"tokenizer": str(tmp_path / "tokenizer")})
    assert (made.tokenizer.pad_token_id == made.tokenizer.eos_token_id) == pad_is_eos
    model, examples = made.build_model().eval(), made.examples("train")
    with torch.no_grad():
        trained = made.scores(model, made.collate([examples[i] for i in range(6)])).tolist()
    model.save_pretrained(str(tmp_path / "out"))
    made.export.save_extras(tmp_path / "out")
    again = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out")).eval()
    sequences = [examples[i][side] for side in ("chosen", "rejected") for i in range(6)]
    with torch.no_grad():
        exported = [
            float(again(input_ids=torch.tensor([ids.tolist()])).logits) for ids in sequences
        ]  # one by one, unpadded
    assert trained == pytest.approx(exported, rel=1e-5)
    assert len({round(score, 5) for score in trained}) > 6, "not all the same position of the same prompt"


def without_pad(folder: Path, **named: str | None) -> Any:
    """The task with a tokenizer that has a pad token and does not name it, as many base models' do."""
    tokenizer = task(folder).tokenizer
    tokenizer.pad_token = None
    for name, token in named.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    model, data = {"tokenizer": str(folder / "tokenizer")}, {"max_length": 128}  # no answer is cut
    return task(folder, model=model, data=data, batch={"packing": False})


def test_a_score_is_read_at_the_eos_of_an_answer_and_its_row_learns(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    made = without_pad(tmp_path)
    model, examples = made.build_model(), made.examples("train")
    end = made.tokenizer.eos_token_id
    batch = made.collate([examples[i] for i in range(6)])
    ids, mask = batch.tensors["input_ids"], batch.tensors["attention_mask"]
    ends = mask.sum(1) - 1  # (2B,)
    assert (ids.gather(1, ends[:, None]) == end).all()
    assert (mask == 0).any()
    scores = made.scores(model, batch)
    states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(scores, model.score(states[torch.arange(len(ids)), ends]).squeeze(-1))
    made.loss(model, batch).total.backward()
    assert model.get_input_embeddings().weight.grad[end].any()
    model.save_pretrained(str(tmp_path / "out"))
    again = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids, attention_mask=mask).logits.squeeze(-1), scores)
    assert not made.checks.warnings()


def test_where_padding_is_eos_a_warning_says_where_scores_are_read(tmp_path: Path) -> None:
    made = without_pad(tmp_path, pad_token="</s>")
    assert made.tokenizer.pad_token_id == made.tokenizer.eos_token_id
    (warning,) = made.checks.warnings()
    assert "read at the token before the EOS" in warning
    assert made.build_model().get_input_embeddings().padding_idx is None


def test_no_warning_about_answers_without_an_end_since_a_score_writes_none(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    scored = task(tmp_path, model={"chat_template": template})
    assert not scored.checks.warnings()
    writer = make_task(RunConfig.model_validate({**tiny_recipe("dpo", tmp_path), "model": scored.recipe.model}))
    assert "answers without an end" in writer.checks.warnings()[0]


@pytest.mark.parametrize("scores_already", [False, True])
def test_a_base_that_pads_with_eos_gets_another_pad_unless_it_gives_scores_already(
    scores_already: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    made = without_pad(tmp_path, pad_token="</s>")
    auto = AutoModelForSequenceClassification if scores_already else AutoModelForCausalLM
    auto.from_config(made.model_source.build_config(made.recipe.model)).save_pretrained(str(tmp_path / "base"))
    made.tokenizer.save_pretrained(str(tmp_path / "base"))
    again = task(tmp_path, model={"path": str(tmp_path / "base"), "config": None})
    assert again.tokenizer.pad_token == ("</s>" if scores_already else "<pad>")
    assert bool(again.checks.warnings()) == scores_already


def test_no_score_keeps_keys_and_values(tmp_path: Path) -> None:
    made = task(tmp_path)
    model = made.build_model()
    assert model.config.use_cache, "an export says what the base says"
    told: list[Any] = []
    model.model.register_forward_hook(lambda *args: told.append(args[-1].past_key_values))
    made.scores(model, made.collate([made.examples("train")[0]]))
    assert told == [None]


def test_metrics_and_loss_are_sums_of_what_the_scores_say(tmp_path: Path) -> None:
    settings = {"center_rewards_coefficient": 0.02, "label_smoothing": 0.1}
    made = task(tmp_path, options=settings)
    model, examples = made.build_model().eval(), made.examples("train")
    batch = made.collate([examples[i] for i in range(7)])
    with torch.no_grad():
        chosen, rejected = made.scores(model, batch).chunk(2)
        found = made.loss(model, batch)
    wanted = bradley_terry(chosen, rejected, batch.tensors["margin"], label_smoothing=0.1, center=0.02)
    assert float(found.total) == pytest.approx(float(wanted.sum()), rel=1e-6)
    assert float(found.metrics["accuracy"]) == sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert float(found.metrics["margin"]) == pytest.approx(float((chosen - rejected).sum()), rel=1e-5)


def test_a_margin_in_the_data_reaches_the_loss(tmp_path: Path) -> None:
    made = task(tmp_path, data={"train": str(tmp_path / "margins.jsonl")})
    row = {"prompt": "Which?", "chosen": "this one", "rejected": "that one"}
    rows = [row | {"margin": 1.5}, row]
    (tmp_path / "margins.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples = made.examples("train")
    assert made.collate([examples[0], examples[1]]).tensors["margin"].tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"center_rewards_coefficient": -1}]
)
def test_options_out_of_range_are_refused(options: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"{next(iter(options))} is"):
        task(tmp_path, options=options)


def test_checking_a_model_changes_nothing_of_it(tmp_path: Path) -> None:
    checked, plain = (task(tmp_path, model={"freeze": ["embed_tokens"]}) for _ in range(2))
    checked.checks.run()
    one, two = checked.build_model(), plain.build_model()
    assert one.config.to_dict() == two.config.to_dict()
    assert all(torch.equal(a, b) and a.requires_grad for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_dropout_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    config = {**tiny_recipe("rm", tmp_path)["model"]["config"], "attention_dropout": 0.5}
    for disabled in (True, False):
        made = task(tmp_path, model={"config": config}, options={"disable_dropout": disabled})
        model = made.build_model().train()
        batch = made.collate([made.examples("train")[0]])
        torch.manual_seed(0)
        first, second = made.scores(model, batch), made.scores(model, batch)
        assert torch.equal(first, second) == disabled
        assert model.config.attention_dropout == 0.5, "an export keeps what the config says"


def test_the_calibration_error_is_that_of_the_paper(tmp_path: Path) -> None:
    """Guo et al., eq. 5, by hand for the five pairs of the first test, and for many from the means of each bin."""
    made = task(tmp_path)

    def error(*parts: list[float]) -> dict[str, float]:
        """Return the metrics of several batches, summed as the meter does."""
        sums: dict[str, tuple[float, float]] = {}
        for part in parts:
            for name, value in calibration_sums(torch.tensor(part)).items():
                total, weight = value if isinstance(value, tuple) else (value, len(part))
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(total), before[1] + float(weight)
        return {**made.finish_metrics({name: pair for name, pair in sums.items() if pair[1]})}

    # Confidences 0.731, 0.711, 0.881, 0.525, 0.985: in the bins up to 0.75 (two pairs, one of them right), 0.9, 0.55, 1.
    differences = [1.0, -0.9, 2.0, -0.1, 4.2]
    confidences = [sigmoid(abs(difference)) for difference in differences]
    both = abs(1 / 2 - (confidences[0] + confidences[1]) / 2) * 2 / 5
    wanted = both + (1 - confidences[2]) / 5 + confidences[3] / 5 + (1 - confidences[4]) / 5
    found = error(differences[:2], differences[2:])
    assert found["calibration_error"] == pytest.approx(wanted, rel=1e-5)
    assert {name: found[name] for name in found if "margin" in name} == {
        "accuracy_margin_0_1": 0.0, "accuracy_margin_1_2": 1.0, "accuracy_margin_2_inf": 1.0,
    }  # fmt: skip
    assert "accuracy_margin_2_inf" not in error([0.5, -0.5]), "no pair, no accuracy"

    many = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 2 + 0.5
    confidence, edges = many.abs().sigmoid(), [0.5 + at / (2 * NUM_BINS) for at in range(NUM_BINS + 1)]
    wanted = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = (many[inside] > 0).float().mean() - confidence[inside].mean()
            wanted += float(inside.sum() / len(many) * gap.abs())
    assert error(many.tolist())["calibration_error"] == pytest.approx(wanted, rel=1e-4)


def test_calibration_is_of_evaluations(tmp_path: Path) -> None:
    """A training row has few pairs in a bin, and stays small."""
    made = task(tmp_path)
    model, examples = made.build_model(), made.examples("train")
    batch = made.collate([examples[i] for i in range(4)])
    assert set(made.loss(model.train(), batch).metrics) == {"accuracy", "margin"}
    assert len(made.loss(model.eval(), batch).metrics) == 2 + NUM_BINS + 3
