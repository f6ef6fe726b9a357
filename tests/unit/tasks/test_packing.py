"""A step on packed batches is the step on padded ones: the same sums and the same gradient, for every packed task."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.batch import PackingMode
from dstrain.config.schema import BatchConfig, RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import RecipeError, TaskError
from dstrain.models.attention.packed import enable_packed_attention, has_packed_attention
from dstrain.tasks import make_task
from dstrain.tasks.common.forward import forward_logits
from dstrain.tasks.common.packing import resolve_packing
from dstrain.tasks.common.task import check_sequence_parallel, load_split
from dstrain.training.build_model import build_train_module
from tests.cells import SLOW, mark_slow
from tests.model_families import family
from tests.parity.cases import one_step, several_steps, tiny_task
from tests.parity.test_step import SGD, distance
from tests.reward_models import export_reward_model
from tests.tiny import LLAVA
from tests.vision_recipes import GEMMA3, IDEFICS3, SAFE, named_recipe, picture
from tests.vocabulary import write_jsonl

GPT2 = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 1, "n_head": 4}
LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"dpo, {loss}": ("dpo", {"moved": True, "options": {"loss_type": loss, "rpo_alpha": 0.0 if loss == "orpo" else 0.3}})
       for loss in ("sigmoid", "ipo", "hinge", "robust", "orpo", "simpo")},
    "dpo, adapters": ("dpo", {"moved": True, **LORA}),
    "dpo, a reference remembered": ("dpo", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    "dpo, safe": ("dpo, safe", {"moved": True}),
    "dpo, with gradient checkpointing": ("dpo", {"moved": True, "model": {"gradient_checkpointing": True}}),
    "rm": ("rm", {"moved": True}),
    "rm, adapters and a score head": ("rm", {"moved": True, **LORA}),
    "rm, a frozen model under its head": ("rm", {"moved": True, "model": {"freeze": ["model"]}}),
    "sft": ("sft", {"moved": True}),
    "sft, eager attention": ("sft", {"moved": True, "model": {"attn_implementation": "eager"}}),
    "sft, qwen3": ("sft", {"moved": True, "model": {"config": family("qwen3")}}),
    "rm, mistral": ("rm", {"moved": True, "model": {"config": family("mistral")}}),
    "dpo, gemma2": ("dpo", {"moved": True, "model": {"config": family("gemma2")}}),
    "sft, every token": ("sft", {"moved": True, "options": {"assistant_only_loss": False}}),
    "kto": ("kto", {"moved": True, "seed": 6}),
    "kto, adapters": ("kto", {"moved": True, "seed": 2, **LORA}),
    "distill": ("distill", {"moved": True}),
    "distill, a teacher remembered": ("distill", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    "kto, a reference remembered": ("kto", {"moved": True, "seed": 6, "options": {"precompute_ref_log_probs": True}}),
    "kto, apo": ("kto", {"moved": True, "options": {"loss_type": "apo_zero_unpaired"}}),
    **{f"{task} with images": (f"{task}, with images", {"moved": True}) for task in ("vlm", "rm", "dpo")},
    **{f"{task} with images, idefics3": (f"{task}, with images", {"moved": True, "model": {"config": IDEFICS3, "freeze": []}, "data": {"max_length": 128}})
       for task in ("vlm", "rm", "dpo")},
    "dpo with images, adapters": ("dpo, with images", {"moved": True, **LORA}),
    "rm with images, adapters": ("rm, with images", {"moved": True, **LORA}),
    "dpo with images, a reference remembered": ("dpo, with images", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    "dpo with images, safe": ("dpo, safe, with images", {"moved": True, "options": {"safety": SAFE}}),
    "dpo with images, checkpointing": ("dpo, with images", {"moved": True, "model": {"gradient_checkpointing": True}}),
    "vlm with images, a frozen tower": ("vlm, with images", {"moved": True, "model": {"freeze": ["vision"]}}),
    **{f"{task} of a vision-language model, text alone": (f"{task}, text alone", {"moved": True}) for task in ("sft", "rm", "dpo", "vlm")},
    "docqa": ("docqa", {"moved": True, "options": {"label_smoothing": 0.1, "focal_gamma": 1.0}}),
    "kto of a vision-language model": ("kto", {"moved": True, "seed": 6, "model": {"config": LLAVA}}),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("fresh_cache")


SAMPLES = [5, 0, 9, 13, 2, 14, 7]


def check_equal(task: str, changes: dict[str, Any], samples: Sequence[int] = SAMPLES, **batch: Any) -> None:
    """Compare a step in two packed micro-batches with the padded step on the same two.

    Padded steps in one and in two micro-batches differ by up to 9e-7 in fp32; tests/parity compares those.
    """
    arguments: dict[str, Any] = {"task": task, "kind": "torch", "samples": [*samples]}
    wanted = one_step(**arguments, accumulate=2, changes=changes | SGD | {"batch": {"packing": False}})
    found = one_step(**arguments, accumulate=2, changes=changes | SGD | {"batch": {"packing": True, **batch}})
    assert distance(found, wanted, "before") == 0
    assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-6, abs=1e-5)
    assert distance(found, wanted) <= 1.5e-6, "1.06e-6 was seen on an AMD EPYC, of 1.0e-6 between padded steps alone"


REPEATED = (
    "dpo, ipo", "dpo, robust", "dpo, simpo",  # sigmoid, hinge and orpo: with and without a reference
    "kto, a reference remembered", "dpo with images, a reference remembered",  # dpo, a reference remembered
    "rm with images, idefics3", "dpo with images, idefics3",  # vlm with images, idefics3
    "dpo with images, safe", "dpo with images, checkpointing",  # dpo, safe; dpo, with gradient checkpointing
    "rm of a vision-language model, text alone", "dpo of a vision-language model, text alone",  # sft and vlm
    "dpo with images, adapters", "sft, qwen3", "rm, mistral",  # rm with images, adapters; attention/test_model_types
    "kto, adapters", "rm, a frozen model under its head", "kto of a vision-language model",  # each alone
    "vlm with images, a frozen tower", "docqa", "sft, every token",  # parity/test_tasks, contract/test_docqa, sft
)  # fmt: skip
"""Cases whose claim those of the comment make too."""


@pytest.mark.parametrize("case", mark_slow(CASES, REPEATED))
def test_a_packed_step_is_the_padded_one(case: str) -> None:
    name, changes = CASES[case]
    check_equal(name, changes)


@pytest.mark.parametrize(
    "case", ["dpo, sigmoid", "rm", SLOW("rm, adapters and a score head"), SLOW("dpo with images"), "rm with images"]
)
def test_packed_pairs_that_share_nothing_equal_padded_ones(case: str) -> None:
    name, changes = CASES[case]
    check_equal(name, changes, prefix_sharing=False)


ALIKE = [
    {"prompt": "Which?", "chosen": "this one it is", "rejected": "this one it is not"},
    {"prompt": "Which?", "chosen": "the same", "rejected": "the sane"},
    {"prompt": "Which one?", "chosen": "that", "rejected": "that or that or that"},
    {"prompt": "A long question, or none?", "chosen": "none", "rejected": "no"},
] * 12


@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_answers_may_begin_alike(task: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "alike.jsonl", ALIKE)
    check_equal(task, {"moved": True, "data": {"train": str(file)}})


def asked_about_images(folder: Path, count: int = 16) -> str:
    """Write pairs on 0 to 3 images: at the beginning, in the middle and at the end of prompts, also of earlier turns."""
    prompts = ["What?", "Is <image> it?", "<image> or <image>?", "This: <image>, that: <image>, or <image>"]
    records = []
    for index in range(count):
        prompt, names = prompts[index % 4], [f"{index}-{at}.png" for at in range(index % 4)]
        for at, name in enumerate(names):
            picture(9 * index + at, (12 + index, 20)).save(folder / name)
        turns = [{"role": "user", "content": prompt}]
        if index % 3 == 0:
            turns += [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "Sure?"}]
        answers = {"chosen": f"it is the fox {index}", "rejected": "it is a dog" + ", a dog" * (index % 5)}
        records.append({"images": names, "prompt": turns, **answers})
    return str(write_jsonl(folder / "asked.jsonl", records))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "rm"])
@pytest.mark.parametrize("batch", [{}, {"prefix_sharing": False}])
@pytest.mark.parametrize("samples", [[5, 2, 7, 0, 1, 4, 11], [0, 4, 8, 12, 3, 6]], ids=["mixed", "one without any"])
def test_images_may_stand_anywhere_in_prompts(task: str, batch: Any, samples: list[int], tmp_path: Path) -> None:
    data = {"train": asked_about_images(tmp_path), "max_length": 256}
    check_equal(f"{task}, with images", {"moved": True, "data": data}, samples, **batch)


@pytest.mark.parametrize("task", ["vlm", "dpo, with images", "rm, with images"])
def test_a_micro_batch_may_be_without_images(task: str) -> None:
    check_equal(task, {"moved": True}, [0, 3, 6, 9, 1, 2, 5])


@pytest.mark.parametrize("task", ["vlm", "dpo, with images", "rm, with images"])
def test_a_model_of_images_sees_each_once(task: str, tmp_path: Path) -> None:
    own = new_task(tmp_path, task)
    batch = make_batch(own.examples("train"), own.collate, [1, 2, 5], 0)
    assert batch.is_packed
    assert len(batch.vision["pixel_values"]) == 1 + 2 + 2
    blank = make_batch(own.examples("train"), own.collate, [0, 3], 0)
    assert (len(blank.vision["pixel_values"]), blank.dummy_rows, len(blank.groups)) == (1, 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["online", "cached"])
def test_reward_models_score_packed_pairs(scoring: str, tmp_path: Path) -> None:
    rms = {f"{name}_rm": str(export_reward_model(tmp_path, name)) for name in ("helpful", "harmless")}
    safety = {**rms, "scoring": scoring, "method": "safedpo", "scaling_weight": 0.5}
    check_equal("dpo", {"moved": True, "options": {"safety": safety}})


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["online", "cached"])
def test_reward_models_score_packed_pairs_with_images(scoring: str, tmp_path: Path) -> None:
    shared = export_reward_model(tmp_path, "helpful", "rm, with images")
    harmless = {"harmless_rm": str(shared), "scoring": scoring, "method": "safedpo"}
    own = {"processor": str(shared)} if scoring == "online" else {}
    check_equal("dpo, with images", {"moved": True, "model": own, "options": {"safety": harmless}})


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rm", SLOW("dpo"), SLOW("sft"), SLOW("kto"), SLOW("vlm"), "dpo, with images"])
def test_evaluations_and_steps_in_turn_give_the_same_losses(task: str) -> None:
    adam = {"optim": {"lr": 1e-3}, "model": {"gradient_checkpointing": True}}
    wanted, found = (several_steps(task, "torch", adam | {"batch": {"packing": packing}}) for packing in (False, True))
    assert found == pytest.approx(wanted, rel=2e-5)


def new_task(folder: Path, name: str, **sections: Any) -> Any:
    recipe = named_recipe(name, folder)[1]
    for key, value in sections.items():
        recipe[key] = {**recipe.get(key, {}), **value}
    return make_task(RunConfig.model_validate(recipe))


@pytest.mark.parametrize("pad_token", ["<pad>", "</s>"])
def test_packed_scores_are_those_that_an_export_gives(pad_token: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tokenizer = new_task(tmp_path, "rm").tokenizer
    tokenizer.pad_token = pad_token
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    own = {"model": {"tokenizer": str(tmp_path / "tokenizer")}, "data": {"max_length": 128}}
    task = new_task(tmp_path, "rm", **own)
    model, examples = task.build_model().eval(), task.examples("train")
    model.save_pretrained(str(tmp_path / "out"))
    again = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out"))
    assert "packed" not in json.loads((tmp_path / "out" / "config.json").read_text()).get("attn_implementation", "")
    batch = make_batch(examples, task.collate, [3, 1, 4, 15], 0)
    assert batch.is_packed
    padded = make_batch(examples, new_task(tmp_path, "rm", **own, batch={"packing": False}).collate, [3, 1, 4, 15], 0)
    with torch.no_grad():
        wanted = forward_logits(again, padded).squeeze(-1)
        torch.testing.assert_close(task.scores(model, batch), wanted, atol=1e-6, rtol=1e-6)
    assert wanted.std() > 1e-3


@pytest.mark.parametrize("name", ["rm", "dpo", "sft", "kto"])
def test_an_export_is_compared_on_padded_batches(name: str, tmp_path: Path) -> None:
    task = new_task(tmp_path, name)
    examples = load_split(task, "train")
    assert examples is not None
    probes = task.export.make_probes([examples[0], examples[1]])
    assert [(probe.is_packed, len(probe.samples)) for probe in probes] == [(False, 1), (False, 1)]
    with torch.no_grad():
        model = task.build_model().eval()
        again = new_task(tmp_path, name, batch={"packing": False}).build_model().eval()
        for probe in probes:
            assert task.export.outputs(model, probe).equal(task.export.outputs(again, probe))


def test_a_prompt_is_computed_once(tmp_path: Path) -> None:
    task = new_task(tmp_path, "dpo")
    examples = task.examples("train")
    batch = make_batch(examples, task.collate, [3, 1], 0)
    pairs = [examples[index] for index in (3, 1)]
    prompts = [int(pair["prompt_length"]) for pair in pairs]
    assert all(prompt <= group.prefix <= prompt + 2 for prompt, group in zip(prompts, batch.groups, strict=True))
    both = sum(len(pair[side]) for pair in pairs for side in ("chosen", "rejected"))
    assert batch.tensors["input_ids"].shape == (1, both - sum(group.prefix for group in batch.groups))
    assert batch.tokens == both


@pytest.mark.parametrize("name", ["dpo", "rm", "sft", "kto"])
def test_a_filler_counts_nothing(name: str, tmp_path: Path) -> None:
    task = new_task(tmp_path, name)
    filler = make_batch(load_split(task, "train"), task.collate, [], 3)
    assert (filler.is_filler, filler.is_packed, filler.weight) == (True, True, 0.0)
    module = build_train_module(task)
    if module.loss_inputs.step_stats is not None:
        answers, _ = module(filler, only="stats")
        filler = filler.with_tensors({**answers, "kl": torch.tensor(0.0)})
    assert module(filler)[0].item() == 0


def test_only_targets_reach_the_head(tmp_path: Path) -> None:
    task = new_task(tmp_path, "sft")
    batch = make_batch(task.examples("train"), task.collate, [1, 0, 2], 0)
    asked, model = [], task.build_model().eval()
    forward = type(model).forward
    model.forward = lambda **inputs: (asked.append(len(inputs["logits_to_keep"])), forward(model, **inputs))[1]
    task.loss(model, batch)
    assert asked == [batch.weight]


def test_a_packed_batch_is_refused_by_a_model_that_would_mix_its_samples(tmp_path: Path) -> None:
    task = new_task(tmp_path, "sft")
    batch = make_batch(task.examples("train"), task.collate, [1, 0], 0)
    eager = {"model": {"attn_implementation": "eager"}}  # functions under other names are replaced for all models
    plain = new_task(tmp_path, "sft", **eager, batch={"packing": False}).build_model()
    with pytest.raises(AssertionError, match=r"a packed batch for a model without `enable_packed_attention`"):
        task.loss(plain, batch)


# auto packs where nothing is in the way and says why where something is; true insists, and false never packs.


def resolve(find: Any = lambda shares: None, has_pairs: bool = True, untested: str | None = None, **keys: Any) -> Any:
    return resolve_packing(BatchConfig(**keys), find, has_pairs, untested)


def shared_alone(shares_prefixes: bool) -> str | None:
    return "it has windows" if shares_prefixes else None


def test_auto_packs_where_nothing_is_in_the_way() -> None:
    assert resolve() == PackingMode(True, True)
    assert resolve(has_pairs=False) == PackingMode(True, False)


@pytest.mark.parametrize(
    ("task", "changes", "reason"),
    [
        ("sft", {"batch": {"packing": False}}, "batch.packing is false"),
        (
            "sft",
            {"model": {"config": family("falcon")}},
            "batches are padded, not packed: no layer of FalconModel calls",
        ),
        ("sft", {"model": {"config": family("qwen3_next")}}, "Qwen3NextGatedDeltaNet reads a sequence token by token"),
        ("sft", {"parallel": {"sequence": 3}}, r"has 4 attention heads, which 3 processes cannot share evenly; 2 or 4"),
        ("sft", {"model": {"config": family("mixtral"), "router_aux_loss_coef": 0.01}}, "the loss of a router"),
        ("protein", {}, "task protein has no packed batches"),
    ],
)
def test_what_processes_cannot_share_is_refused(task: str, changes: dict[str, Any], reason: str) -> None:
    found = tiny_task(task, {"parallel": {"sequence": 2}, **changes})
    with pytest.raises(RecipeError, match=rf"parallel\.sequence: is [23], but .*{reason}"):
        check_sequence_parallel(found)


def test_auto_says_why_it_does_not_pack() -> None:
    assert resolve(lambda shares: "it is a Mamba") == PackingMode(
        False, message="batches are padded, not packed: it is a Mamba"
    )
    mode = resolve(shared_alone)
    assert (mode.is_packed, mode.shares_prefixes) == (True, False)
    assert "it has windows" in mode.message


def test_false_turns_packing_off_without_a_message() -> None:
    assert resolve(packing=False) == PackingMode(False)
    assert resolve(prefix_sharing=False) == PackingMode(True)


@pytest.mark.parametrize(
    ("keys", "find"),
    [
        ({"packing": True}, lambda shares: "it is a Mamba"),
        ({"prefix_sharing": True}, lambda shares: "it is a Mamba"),
        ({"prefix_sharing": True}, shared_alone),
    ],
)
def test_true_is_refused_where_packing_is_impossible(keys: dict[str, Any], find: Any) -> None:
    with pytest.raises(RecipeError, match=rf"batch\.{next(iter(keys))}: is true, but it .* set it to auto or false"):
        resolve(find, **keys)


def test_sharing_needs_pairs() -> None:
    with pytest.raises(RecipeError, match=r"batch\.prefix_sharing: .* no pairs of answers; leave it out"):
        resolve(has_pairs=False, prefix_sharing=True)


def test_padded_rows_share_nothing() -> None:
    with pytest.raises(RecipeError, match=r"batch\.prefix_sharing: is true, but batch\.packing is false"):
        resolve(packing=False, prefix_sharing=True)


def test_untested_rows_are_packed_only_if_asked_for() -> None:
    assert resolve(untested="Own may expect padded rows").message.endswith("Own may expect padded rows")
    assert resolve(untested="Own may expect padded rows", packing=True) == PackingMode(True, True)


@pytest.mark.parametrize("base", ["dpo.DPO", "rm.RewardModel", "kto.KTO", "sft.SFT"])
def test_a_derived_task_gets_padded_rows_unless_it_says_that_it_packs(base: str, tmp_path: Path) -> None:
    module, name = base.split(".")
    made: dict[str, Any] = {}
    for body in ("pass", "packs_batches = True"):
        file = tmp_path / f"{body[:4]}.py"
        file.write_text(
            f"from dataclasses import dataclass\nfrom dstrain.tasks.{module} import {name}\n\n"
            f"@dataclass(frozen=True, kw_only=True)\nclass Own({name}):\n    {body}\n"
        )
        recipe = named_recipe(module, tmp_path)[1] | {"task": str(file)}
        made[body] = make_task(RunConfig.model_validate(recipe))
    assert made["packs_batches = True"].packing.is_packed
    assert not made["pass"].packing.is_packed
    assert "write packs_batches = True in the class" in made["pass"].packing.message
    recipe["task"] = str(tmp_path / "pass.py")
    forced: Any = make_task(RunConfig.model_validate(recipe | {"batch": {**recipe["batch"], "packing": True}}))
    assert forced.packing.is_packed


@pytest.mark.parametrize("name", ["rm", "dpo", "sft", "kto"])
def test_a_llama_is_packed_by_default(name: str, tmp_path: Path) -> None:
    made: Any = new_task(tmp_path, name)
    assert made.packing == PackingMode(True, name in ("rm", "dpo"))
    assert not [line for line in made.checks.info_messages() if "pack" in line]


@pytest.mark.parametrize("name", ["dpo", "sft", "kto"])
def test_the_form_is_decided_where_it_is_asked_for(name: str, tmp_path: Path) -> None:
    """The launcher of `dstrain prepare` asks for the frozen models only, and imports no torch."""
    made: Any = new_task(tmp_path, name)
    inputs = made.loss_inputs
    assert not {"model_source", "packing"} & vars(made).keys()
    assert inputs.packing() == PackingMode(True, name == "dpo")


@pytest.mark.parametrize("name", ["vlm", "docqa", "rm, with images", "dpo, with images"])
def test_a_llava_is_packed_by_default(name: str, tmp_path: Path) -> None:
    made: Any = new_task(tmp_path, name)
    assert made.packing == PackingMode(True, made.has_pairs)


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "images read in both directions": (
        "dpo, with images",
        {"model": {"config": GEMMA3}},
        r"Gemma3Model has masks of another kind",
    ),
    "corrupted images": ("dpo, safe, with images", {}, "corrupted images"),
    "a family": ("sft", {"model": {"config": family("mamba2")}}, "Mamba2ForCausalLM"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_in_the_way_is_told_at_start_or_refused(case: str, tmp_path: Path) -> None:
    name, sections, reason = UNSUPPORTED[case]
    made: Any = new_task(tmp_path, name, **sections)
    assert not made.packing.is_packed
    lines = [line for line in made.checks.info_messages() if line.startswith("batches are padded, not packed: ")]
    assert len(lines) == 1
    assert re.search(reason, lines[0])
    forced: Any = new_task(tmp_path, name, **sections, batch={"packing": True})
    with pytest.raises(RecipeError, match=rf"batch\.packing: is true, but .*{reason}"):
        forced.checks.run()


@pytest.mark.parametrize("name", ["temporal", "protein"])
def test_tasks_that_cannot_pack_refuse_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=rf"batch\.packing: is true, but task {name} has padded rows only"):
        new_task(tmp_path, name, batch={"packing": True})


OWN_CODE = """
from transformers import LlamaForCausalLM


class OwnLlama(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, packed_groups=None, **inputs):
        return super().forward(input_ids=input_ids, position_ids=position_ids, **inputs)
"""


@pytest.mark.parametrize("is_trusted", [True, False])
def test_code_that_comes_with_weights_of_a_known_config_is_not_packed(is_trusted: bool, tmp_path: Path) -> None:
    """Its attention may not read the groups; without trust transformers' own class is built."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "own"
    new_task(tmp_path, "sft").tokenizer.save_pretrained(str(folder))  # type: ignore[attr-defined]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama"))).save_pretrained(str(folder))
    (folder / "modeling_own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnLlama"}
    (folder / "config.json").write_text(json.dumps(config))
    model = {"config": None, "path": str(folder), "trust_remote_code": is_trusted}
    made: Any = new_task(tmp_path, "sft", model=model)
    assert made.packing.is_packed is not is_trusted
    if is_trusted:
        assert "the model runs code that came with its weights" in made.packing.message
        built = made.build_model()
        enable_packed_attention(built)
        assert not has_packed_attention(built)


def test_a_reference_that_cannot_be_packed_turns_packing_off(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    made: Any = new_task(tmp_path, "dpo")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("mamba2"))).save_pretrained(str(tmp_path / "other"))
    made.tokenizer.save_pretrained(str(tmp_path / "other"))
    other: Any = new_task(tmp_path, "dpo", options={"ref_model": str(tmp_path / "other")})
    assert not other.packing.is_packed
    assert "of options.ref_model:" in other.packing.message
