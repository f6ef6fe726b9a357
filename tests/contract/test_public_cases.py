"""Situations of public reports that stay right; docs/measurements/public-cases.md lists them with what was seen."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.data.prepare import describe_examples
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, RecipeError
from dstrain.models.params import build_param_groups
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs
from tests.chat_templates import tokenizer_of
from tests.contract.public_cases import CASES, MISTRAL, SPACED, TINY, Case, byte_tokenizer, make, read_marked
from tests.parity.cases import move
from tests.vision_recipes import GEMMA3, named_recipe, picture
from tests.vocabulary import message, write_jsonl

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


ANSWERS = [
    {"prompt": f"{'ask ' * at}it: ", "completion": "so " * count}
    for at, count in enumerate((1, 40, 2, 13, 1, 7, 3, 25))
]
"""Their lengths differ much: a mean of means is far from the mean over tokens."""


def engine_of(made: Any, moved: bool = True) -> TorchEngine:
    objective = build_train_module(made)
    if moved:
        move(objective.model)
    return TorchEngine(
        objective, build_param_groups(objective.model, made.recipe.optim), made.recipe.optim, torch.device("cpu")
    )


def batches_of(made: Any, chunks: Sequence[Sequence[int]]) -> list[Batch]:
    job = OutputsJob(
        task=made, ds_config={"zero_optimization": {"stage": 0}}, micro_batch_size=4, world=SingleProcessWorld()
    )
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
    model, lr = engine.train_module.model, SGD["lr"]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    result = engine.step(batches, lr=lr)
    after = dict(model.named_parameters())
    return (
        float(result.loss) / result.weight,
        {name: (before[name] - after[name].detach()) / lr for name in before},
        result.grad_norm,
    )


def distance(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    square = lambda values: float(sum(value.double().square().sum() for value in values))  # noqa: E731
    return (square(actual[name] - wanted[name] for name in wanted) / square(wanted.values())) ** 0.5


SPLITS = {"one": [range(8)], "two": [range(4), range(4, 8)], "eight": [[at] for at in range(8)]}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_a_step_is_the_mean_over_its_tokens_however_it_is_split(split: str, packing: bool, tmp_path: Path) -> None:
    """transformers#37766, #35438 and #34242, mlx-lm#1697, trl#3728; packed: nanoVLM#201, LlamaFactory#7318,
    axolotl#1375, unsloth#1207, torchtune#2613."""
    made = make(
        tmp_path, "sft", ANSWERS, byte_tokenizer(), optim=SGD, batch={"total": 8, "micro": 8, "packing": packing}
    )
    engine = engine_of(made)
    model, rows = engine.train_module.model, rows_of(made)
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in rows)
    assert count == sum(len(record["completion"]) + 1 for record in ANSWERS)
    total = sum(model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != -100).sum() for ids, labels in rows)
    (total / count).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    batches = batches_of(made, SPLITS[split])
    assert batches[0].is_packed == packing
    loss, gradients, norm = take_step(engine, batches)
    assert loss == pytest.approx(float(total) / count, rel=1e-6)
    assert distance(gradients, wanted) < 2e-6
    assert norm == pytest.approx(sum(float(gradient.square().sum()) for gradient in wanted.values()) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_a_step_is_clipped_once_and_its_norm_is_that_before(split: str, tmp_path: Path) -> None:
    """transformers#1563 and #986 (clipped after each micro-batch); DeepSpeed#6767 and #7220 (the norm of the log is above
    the limit: it is that before clipping)."""
    made = make(tmp_path, "sft", ANSWERS, byte_tokenizer(), optim={**SGD, "clip": 0.01}, batch={"total": 8, "micro": 8})
    _, gradients, norm = take_step(engine_of(made), batches_of(made, SPLITS[split]))
    assert norm > 0.1
    assert sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5 == pytest.approx(
        0.01, rel=1e-3
    )


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

    options = {
        "teacher": teacher(tmp_path, vocab_size),
        "top_k": 272,
        "ce_weight": 0.25,
        "precompute_ref_log_probs": True,
    }
    made = make(
        tmp_path, "distill", ANSWERS, byte_tokenizer(), options=options, optim=SGD, batch={"total": 8, "micro": 8}
    )
    made.checks.run()
    engine, guide = engine_of(made), AutoModelForCausalLM.from_pretrained(options["teacher"]).eval()
    wanted, count = 0.0, 0
    for ids, labels in rows_of(made):
        learnt_at = labels[0, 1:] != -100
        with torch.no_grad():
            logits, theirs = (
                engine.train_module.model(input_ids=ids).logits[0, :-1][learnt_at],
                guide(input_ids=ids).logits[0, :-1][learnt_at],
            )
        student, p = logits.double().log_softmax(-1), theirs.double().softmax(-1)
        # Rows without a token are cut off.
        p = p[:, :272] / p[:, :272].sum(-1, keepdim=True)
        wanted += 0.75 * float((p * (p.log() - student)).sum()) - 0.25 * float(
            student.gather(-1, labels[0, 1:][learnt_at, None]).sum()
        )
        count += int(learnt_at.sum())
    loss, _, _ = take_step(engine, batches_of(made, SPLITS[split]))
    assert loss == pytest.approx(wanted / count, rel=1e-4)


FEEDBACK = [
    {"prompt": f"ask {at}: ", "completion": f"so {at} {'and on ' * (at % 3)}", "label": at % 3 == 0} for at in range(5)
]


@pytest.mark.parametrize(
    "split", [[range(5)], [range(3), range(3, 5)], [[at] for at in range(5)]], ids=["5", "3 and 2", "1"]
)
def test_no_answer_is_its_own_mismatch(split: list[list[int]], tmp_path: Path) -> None:
    """trl#1911 (odd batches), #1380 (batches without a mismatch), #2554 (batches of 1), LlamaFactory#7509."""
    made = make(tmp_path, "kto", FEEDBACK, byte_tokenizer(), optim=SGD, options={"beta": 0.5})
    examples = made.examples("train")
    for example in [examples[at] for at in range(5)]:
        (ids, mask), other, other_mask = (
            learnt("kto", example)[0],
            *([*map(int, example[name])] for name in ("mismatched", "mismatched_loss_mask")),
        )
        start = mask.index(1)
        assert other[:start] == ids[:start]
        assert other_mask.index(1) == start
        assert other[start:] != ids[start:]
        assert any(other[start:] == learnt("kto", examples[at])[0][0][-len(other[start:]) :] for at in range(5))
    engine = engine_of(made)
    policy, reference = engine.train_module.model, engine.train_module.reference_model.model

    def ratio(ids: Any, mask: Any) -> float:
        row, on = torch.tensor([[*map(int, ids)]]), torch.tensor([*map(int, mask)])[1:] == 1
        sides = [
            model(input_ids=row).logits[0, :-1].double().log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0][on].sum()
            for model in (policy, reference)
        ]
        return float(sides[0] - sides[1])

    with torch.no_grad():
        all_examples = [examples[at] for at in range(5)]
        anchor = max(
            0.0, sum(ratio(example["mismatched"], example["mismatched_loss_mask"]) for example in all_examples) / 5
        )
        signs = [1 if record["label"] else -1 for record in FEEDBACK]
        wanted = sum(
            1 - torch.sigmoid(torch.tensor(0.5 * sign * (ratio(example["answer"], example["answer_loss_mask"]) - anchor)))
            for sign, example in zip(signs, all_examples, strict=True)
        ) / 5  # fmt: skip
    loss, _, _ = take_step(engine, batches_of(made, split))
    assert loss == pytest.approx(float(wanted), rel=1e-5)
    assert engine.train_module.reference_model is not None


PAIRS = [{"prompt": f"{'ask ' * at}it: ", "chosen": "so " * (at + 1), "rejected": "no " * (7 - at)} for at in range(6)]


@pytest.mark.parametrize("pad", ["<|end|>", "<pad>"])
@pytest.mark.parametrize("packing", [False, True])
def test_scores_depend_neither_on_their_batch_nor_on_padding(packing: bool, pad: str, tmp_path: Path) -> None:
    """reward-bench#137, LlamaFactory#689, trlx#474 (the batch), RLHF-Reward-Modeling#49, trl#937 and reward-bench#115 (EOS
    pads, or nothing does), pytorch/rl#3887 (the pad token of another tokenizer)."""
    tokenizer = byte_tokenizer(bos_token=None, eos_token="<|end|>", pad_token=pad)
    made = make(tmp_path, "rm", PAIRS, tokenizer, batch={"total": 6, "micro": 6, "packing": packing})
    model, examples = engine_of(made).train_module.model.eval(), made.examples("train")
    with torch.no_grad():
        alone, together = [], made.scores(model, batches_of(made, [range(6)])[0])
        for side in ("chosen", "rejected"):
            for at in range(6):
                ids = torch.tensor([[*map(int, examples[at][side])]])
                hidden = model.model(input_ids=ids).last_hidden_state[0]
                # With EOS as the pad token, transformers reads the score before it, and so do servers of the model.
                alone.append(float(model.score(hidden[-2 if pad == "<|end|>" else -1])))
        theirs = [float(model(input_ids=torch.tensor([[*map(int, examples[at]["chosen"])]])).logits) for at in range(6)]
    assert together.tolist() == pytest.approx(alone, abs=2e-6)
    assert theirs == pytest.approx(alone[:6], abs=2e-6)
    assert min(abs(a - b) for a, b in zip(alone[:6], alone[6:], strict=True)) > 1e-6, "no pair has one score"


def test_a_step_without_a_label_is_not_learnt(tmp_path: Path) -> None:
    """trl#2127: labels that had become true or false everywhere."""
    records = [
        {"prompt": "ask: ", "completions": ["one", "two", "three"], "labels": [True, None, False]},
        {"prompt": "ask it: ", "completions": ["a", "b"], "labels": [False, True]},
    ]
    made = make(tmp_path, "prm", records, byte_tokenizer(bos_token=None), optim=SGD, batch={"total": 2, "micro": 2})
    engine = engine_of(made)
    wanted = []
    for text, labels in (("ask: one\ntwo\nthree\n", {8: 1, 18: 0}), ("ask it: a\nb\n", {9: 0, 11: 1})):
        with torch.no_grad():
            logits = engine.train_module.model(input_ids=torch.tensor([[*text.encode()]])).logits[0].double()
        assert all(text[at] == "\n" for at in labels)
        wanted += [float(-logits[at].log_softmax(-1)[label]) for at, label in labels.items()]
    loss, _, _ = take_step(engine, batches_of(made, [range(2)]))
    assert loss == pytest.approx(sum(wanted) / 4, rel=1e-6)


MOE = {
    **TINY,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


@pytest.mark.parametrize("packing", [False, True])
def test_padding_is_no_load_of_an_expert(packing: bool, tmp_path: Path) -> None:
    """Megatron-LM#1984 and #2142: the router's loss counted padding. By hand from the logits of rows without padding."""
    made = make(
        tmp_path,
        "sft",
        ANSWERS,
        byte_tokenizer(),
        model={"config": MOE},
        optim=SGD,
        batch={"total": 8, "micro": 8, "packing": packing},
    )
    engine = engine_of(made)
    with torch.no_grad():
        rows = [
            engine.train_module.model.model(input_ids=ids, output_router_logits=True).router_logits[0]
            for ids, _ in rows_of(made)
        ]
        routed = torch.cat(rows).double().softmax(-1)
        load = torch.zeros_like(routed).scatter(-1, routed.topk(2).indices, 1.0).mean(0)
        wanted = 4 * float((load * routed.mean(0)).sum())
    _, metrics = engine.train_module(batches_of(made, [range(8)])[0])
    assert float(metrics["aux_loss"][0] / metrics["aux_loss"][1]) == pytest.approx(wanted, rel=1e-5)


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    """Fast-LLM#542 and oumi#341."""
    config = {**TINY, "model_type": "qwen2"}
    optim = {"name": "sgd", "lr": 1000.0, "weight_decay": 0.5}
    made = make(tmp_path, "sft", ANSWERS, byte_tokenizer(), model={"config": config}, optim=optim)
    model = made.build_model()
    groups = build_param_groups(model, made.recipe.optim)
    decays = {id(parameter): group.weight_decay for group in groups for parameter in group.params}
    assert {name for name, parameter in model.named_parameters() if decays[id(parameter)] == 0} == {
        name for name, _ in model.named_parameters() if "norm" in name or "bias" in name
    }


def test_the_reference_is_the_initial_policy_without_dropout(tmp_path: Path) -> None:
    """trl#5542's review (dropout in the reference), LlamaFactory#8459: the first loss of DPO is log 2, to the last digit."""
    made = make(
        tmp_path,
        "dpo",
        PAIRS,
        byte_tokenizer(),
        model={"config": {**TINY, "attention_dropout": 0.5}, "lora": {"rank": 4, "dropout": 0.5}},
        optim=SGD,
    )
    loss, _, _ = take_step(engine_of(made, moved=False), batches_of(made, [range(4)]))
    assert loss == pytest.approx(0.6931471805599453, abs=1e-7)


@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_both_answers_of_a_pair_fit_and_have_one_prompt(task: str, tmp_path: Path) -> None:
    """LlamaFactory#4402 and #4617: the rejected answer was longer than the limit."""
    records = [
        {"prompt": "ask " * 9, "chosen": "so " * chosen, "rejected": "no " * rejected}
        for chosen, rejected in ((1, 30), (30, 1), (30, 30))
    ]
    made = make(tmp_path, task, records, byte_tokenizer(), data={"max_length": 60})
    examples = made.examples("train")
    for example in [examples[at] for at in range(3)]:
        start = int(example["prompt_length"])
        assert [*example["chosen"][:start]] == [*example["rejected"][:start]] == [256, *b"ask " * 9][
            -start:
        ] or start < 37
        assert max(len(example["chosen"]), len(example["rejected"])) <= 60
        assert min(len(example["chosen"]), len(example["rejected"])) > start


def spell(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of the tokens, with the spaces that sentencepiece writes as ▁ and its bytes."""
    text = "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ").replace("Ġ", " ")
    return re.sub("<0x(..)>", lambda match: chr(int(match[1], 16)), text)


@pytest.mark.parametrize("template", [SPACED, MISTRAL], ids=["a space in front", "no space"])
@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "legacy metaspace"])
def test_answers_are_learnt_whole_where_tokens_merge(kind: str, template: str, tmp_path: Path) -> None:
    """trl#1153, #1960 and #2054, lattice#1545, unsloth-zoo#832: a token of prompt and answer together."""
    tokenizer = copy.deepcopy(tokenizer_of(kind, adds_bos=True))
    tokenizer.chat_template, tokenizer.pad_token = template, "<unk>"
    records = [
        {"prompt": [message("user", "where is the dog?")], "chosen": chosen, "rejected": rejected}
        for chosen, rejected in (("the river", "46 foxes"), ("$46 here", "over"))
    ]
    made = make(tmp_path, "dpo", records, tokenizer, model={"config": {**TINY, "vocab_size": 700}})
    examples = made.examples("train")
    for at, record in enumerate(records):
        start = int(examples[at]["prompt_length"])
        for side in ("chosen", "rejected"):
            ids = [*map(int, examples[at][side])]
            whole = tokenizer.apply_chat_template(
                [*record["prompt"], message("assistant", record[side])], return_dict=True
            )["input_ids"]
            assert ids == whole
            assert spell(tokenizer, ids[start:]).strip() == record[side] + "</s>"


def test_students_and_teachers_with_other_ids_are_refused(tmp_path: Path) -> None:
    """trl#4562, DistillKit#7 and #29: the teacher read the student's ids as its own."""
    place = teacher(tmp_path, 272)
    other = byte_tokenizer()
    other.add_tokens(["qq"])
    other.save_pretrained(place)
    made = make(tmp_path, "distill", ANSWERS, byte_tokenizer(), options={"teacher": place})
    with pytest.raises(RecipeError, match=r"options\.teacher: .* has another vocabulary"):
        made.checks.run()


@pytest.mark.parametrize("length", [200, 60])
def test_images_and_their_kinds_of_tokens_stay_with_a_cut_answer(length: int, tmp_path: Path) -> None:
    """trl#5283 and #5284, Automodel#3531: what belongs to a token is cut with it, what belongs to an image is not."""
    picture(1).save(tmp_path / "a.png")
    record = {"images": ["a.png"], "messages": [message("user", "<image>what"), message("assistant", "fox " * 60)]}
    values = {
        "model": {"config": GEMMA3},
        "data": {"train": str(write_jsonl(tmp_path / "x.jsonl", [record] * 2)), "max_length": length},
    }
    made: Any = make_task(RunConfig.model_validate(named_recipe("vlm", tmp_path)[1] | values))
    objective = build_train_module(made).eval()
    batch = make_batch(made.examples("train"), made.collate, [0], 0)
    ids, mask = batch.tensors["input_ids"], batch.tensors["loss_mask"]
    labels = torch.full_like(ids, -100)
    labels[:, ids.shape[1] - mask.shape[1] :][mask == 1] = ids[:, ids.shape[1] - mask.shape[1] :][mask == 1]
    model = objective.model
    with torch.no_grad():
        kinds = (ids == model.config.image_token_id).long()
        theirs = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            token_type_ids=kinds,
            pixel_values=batch.vision["pixel_values"],
            labels=labels,
        )
        total, _ = objective(batch)
    assert ids.shape[1] <= length
    assert int(kinds.sum()) == (56 // 14) ** 2
    assert float(total) / batch.weight == pytest.approx(float(theirs.loss), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["ipo", "simpo", "sigmoid"])
@pytest.mark.parametrize("packing", [False, True])
def test_means_over_tokens_are_taken_where_a_loss_has_them(loss_type: str, packing: bool, tmp_path: Path) -> None:
    """torchtune#1291, trl#1265 and ms-swift#9925 (sums in IPO, and means over a packed row), SimPO#13 and minimind#298 (the
    length is that of the answer)."""
    made = make(
        tmp_path, "dpo", PAIRS, byte_tokenizer(), optim=SGD, batch={"total": 6, "micro": 6, "packing": packing},
        options={"loss_type": loss_type, "beta": 0.3},
    )  # fmt: skip
    engine = engine_of(made)
    frozen = engine.train_module.reference_model
    wanted = 0.0
    for example in [made.examples("train")[at] for at in range(6)]:
        values = []
        for side in ("chosen", "rejected"):
            ids, start = torch.tensor([[*map(int, example[side])]]), int(example["prompt_length"])
            with torch.no_grad():
                log_probs = [
                    model(input_ids=ids)
                    .logits[0, :-1]
                    .double()
                    .log_softmax(-1)
                    .gather(-1, ids[0, 1:, None])[start - 1 :, 0]
                    for model in (engine.train_module.model, *([frozen.model] if frozen else []))
                ]
            values.append([float(part.sum() if loss_type == "sigmoid" else part.mean()) for part in log_probs])
        (chosen, *chosen_ref), (rejected, *rejected_ref) = values
        margin = chosen - rejected - (chosen_ref[0] - rejected_ref[0] if chosen_ref else 0.0)
        if loss_type == "ipo":
            wanted += (margin - 1 / (2 * 0.3)) ** 2 / 6
        else:
            gamma = 0.5 if loss_type == "simpo" else 0.0
            wanted -= float(torch.nn.functional.logsigmoid(torch.tensor(0.3 * margin - gamma, dtype=torch.float64))) / 6
    loss, _, _ = take_step(engine, batches_of(made, [range(6)]))
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_adapters_learn_under_gradient_checkpointing(tmp_path: Path) -> None:
    """open-unlearning#178 and LoRA#120: no gradient reached the adapters of checkpointed layers."""
    adapters = []
    for checkpointing in (False, True):
        model = {
            "lora": {"rank": 4},
            "gradient_checkpointing": checkpointing,
            "config": {**TINY, "num_hidden_layers": 3},
        }
        engine = engine_of(make(tmp_path, "sft", ANSWERS, byte_tokenizer(), optim=SGD, model=model))
        _, gradients, _ = take_step(engine, batches_of(engine.train_module.task, [range(8)]))
        adapters.append({name: gradient for name, gradient in gradients.items() if "lora_" in name})
    assert distance(adapters[1], adapters[0]) < 1e-5
    assert all(float(gradient.abs().max()) > 0 for gradient in adapters[1].values())
