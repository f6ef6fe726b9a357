"""Random combinations of what a recipe can ask for take the step that the papers' formulas give, row by row."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.models.quantization import import_bitsandbytes
from dstrain.models.tiles import find_token_functions
from tests.chat_templates import WORDS, chat
from tests.model_families import FAMILIES, MORE_FAMILIES, family
from tests.parity.cases import tiny_task
from tests.parity.reference import (
    TEMPLATE,
    Model,
    Row,
    dpo_term,
    encode_answer,
    encode_conversation,
    rm_term,
    sft_terms,
    trained_only,
)
from tests.vision_recipes import GEMMA3, IDEFICS3, llava, picture
from tests.vocabulary import message, write_jsonl
from tests.workers import Workers

NUM_RECORDS = 12
SEEDS = range(120)
QUICK = (0, 5)
"""Seeds of combinations that every run of the tests tries."""
LR = 1000.0
"""So large that the difference of the weights is the gradient to fp32's precision."""
ADAMW = {"name": "adamw", "lr": 1.0, "clip": 0.0, "eps": 0.01, "weight_decay": 0.1}
"""With an epsilon that a gradient of rounding errors does not reach."""
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}
WITH_PROJECTIONS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "olmoe",
    "granite",
    "smollm3",
)
"""Families with LORA's targets."""
PREFERENCES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.5, "label_smoothing": 0.1},
    {"loss_type": "ipo", "beta": 0.3},
    {"loss_type": "hinge", "beta": 0.4},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7},
    {"loss_type": "orpo", "beta": 0.2},
]


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS.split(), k=draw.randint(1, 9)))


@cache
def records(task: str) -> list[dict[str, Any]]:
    """Return conversations of one to three questions, or pairs of answers."""
    draw, made = random.Random(f"records of {task}"), []
    for _ in range(NUM_RECORDS):
        if task == "sft":
            turns = [
                [message("user", sentence(draw)), message("assistant", sentence(draw))]
                for _ in range(draw.randint(1, 3))
            ]
            made.append({"messages": [part for turn in turns for part in turn]})
        else:
            asked, answers = sentence(draw), [sentence(draw), sentence(draw)]
            if answers[0] == answers[1]:
                answers[1] += " dog"
            made.append({"prompt": [message("user", asked)], "chosen": answers[0], "rejected": answers[1]})
    return made


def make_changes(folder: Path, task: str, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the changes of a tiny recipe: own data, and a tokenizer whose template the reference writes by hand."""
    tokenizer = chat("qwen", "byte-level")
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<unk>"
    tokenizer.save_pretrained(folder / "tokenizer")
    file = str(write_jsonl(folder / f"{task}.jsonl", records(task)))
    return {
        "model": {"tokenizer": str(folder / "tokenizer"), **model},
        "data": {"train": [{"path": file}], "eval": {"path": file}, "max_length": 256},
        "optim": {"name": "sgd", "lr": LR, "clip": 0.0, **sections.pop("optim", {})},
        **sections,
    }


def config_of(name: str) -> dict[str, Any]:
    return {**family(name), "vocab_size": len(chat("qwen", "byte-level"))}


@cache
def is_tiled(name: str) -> bool:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(name)))
    return any(True for _ in find_token_functions(model))


def draw_combination(seed: int, folder: Path) -> dict[str, Any]:
    """Return the arguments of `one_step`, and what the reference needs to know."""
    draw = random.Random(seed)
    task = draw.choice(["sft", "dpo", "rm"])
    with_adapters = draw.random() < 0.35
    names = WITH_PROJECTIONS if with_adapters else (*FAMILIES, *MORE_FAMILIES)
    if task == "rm":
        names = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral")
    name = draw.choice(names)
    model: dict[str, Any] = {"config": config_of(name), "gradient_checkpointing": draw.choice([True, False, 0.5])}
    if with_adapters and name in WITH_PROJECTIONS:
        model["lora"] = LORA
    if is_tiled(name) and draw.random() < 0.4:
        model["tiled_mlp"] = draw.choice([True, 16])
    options: dict[str, Any] = {"dpo": draw.choice(PREFERENCES), "rm": {"center_rewards_coefficient": 0.1}}.get(task, {})
    batch = {"packing": draw.choice(["auto", False]), "prefix_sharing": draw.choice(["auto", False])}
    changes = make_changes(folder, task, model, options=options, batch=batch, moved=True)
    if draw.random() < 0.3:
        changes["optim"] = ADAMW
    kind = draw.choice(["zero0", "zero1", "zero2", "zero3"])
    return {"task": task, "name": name, "kind": kind, "accumulate": draw.choice([1, 2]), "changes": changes}


def plain_module(task: str, config: dict[str, Any]) -> torch.nn.Module:
    """Return transformers' own model, with any weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification if task == "rm" else AutoModelForCausalLM
    more = {"num_labels": 1} if task == "rm" else {}
    return auto.from_config(AutoConfig.for_model(**config, **more), attn_implementation="eager")  # type: ignore[no-any-return]


def rows_of(task: str, samples: list[int]) -> list[Any]:
    """Return the encoded records: rows, or pairs of rows."""
    tokenizer = chat("qwen", "byte-level")
    chosen = [records(task)[index] for index in samples]
    if task == "sft":
        return [encode_conversation(tokenizer, record["messages"]) for record in chosen]
    return [
        tuple(encode_answer(tokenizer, record["prompt"][0]["content"], record[key]) for key in ("chosen", "rejected"))
        for record in chosen
    ]


def step_of_reference(
    task: str, model: Model, reference: Model | None, rows: list[Any], options: Mapping[str, Any]
) -> tuple[float, float, dict[str, np.ndarray[Any, Any]]]:
    """Return the sum of the losses, their weight, and the gradient of their mean."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        if isinstance(row, Row):
            term, units = sft_terms(model.run, row)
        elif task == "rm":
            term, units = rm_term(model.run, row, options), 1.0
        else:
            assert reference is not None
            term, units = dpo_term(model.run, reference.run, row, options), 1.0
        total, weight = total + term.double(), weight + units
    names = [*model.trained]
    grads = torch.autograd.grad(total / weight, [model.trained[name] for name in names], allow_unused=True)
    pairs = zip(names, grads, strict=True)
    return (
        float(total.detach()),
        weight,
        {name: np.zeros(0) if one is None else one.double().numpy() for name, one in pairs},
    )


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Return the distance over all trained parameters, relative to the gradient's norm."""
    assert {*wanted} >= {name for name, value in found.items() if np.any(value)}
    error = norm = 0.0
    for name, value in wanted.items():
        if value.size:
            error += float(((np.asarray(found[name]) - value) ** 2).sum())
            norm += float((value**2).sum())
        else:
            assert not np.any(found.get(name, 0)), name
    return (error / norm) ** 0.5


SAMPLES = [5, 0, 9, 11, 2, 7]


def compare(
    task: str, changes: dict[str, Any], found: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> float:
    """Return the relative difference of the gradient, after comparing loss and weight. `base`: of frozen weights."""
    adapters = "lora" in changes["model"]
    scale = LORA["alpha"] / LORA["rank"]  # type: ignore[operator]
    config = changes["model"]["config"]
    before = {**found["before"], **(base or {})}
    model = Model(plain_module(task, config), before, scale)
    start = None
    if task == "dpo":
        untouched = tiny_task(task, {key: value for key, value in changes.items() if key != "moved"}).build_model()
        values = {name: value.detach() for name, value in untouched.named_parameters()}
        start = Model(plain_module(task, config), {**values, **(base or {})}, scale)
    total, weight, gradient = step_of_reference(task, model, start, rows_of(task, SAMPLES), changes.get("options", {}))
    assert found["sums"][1] == weight
    assert found["sums"][0] == pytest.approx(total, rel=1e-5, abs=1e-5)
    if changes["optim"]["name"] == "adamw":
        gradient = {
            name: adamw_step(name, value, model.trained[name], changes["optim"]) for name, value in gradient.items()
        }
    return difference(trained_only(found["gradient"], adapters), gradient)


def adamw_step(name: str, gradient: Any, weight: torch.Tensor, optim: Mapping[str, Any]) -> Any:
    """Return the first step at rate 1: both averages, corrected, are the gradient and its square (arXiv 1711.05101)."""
    decays = weight.ndim >= 2 and not name.endswith("bias")
    moved = gradient / (np.abs(gradient) + optim["eps"]) if gradient.size else np.zeros(tuple(weight.shape))
    return moved + (optim["weight_decay"] * weight.detach().double().numpy() if decays else 0.0)


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS]
)
def test_a_random_combination_takes_the_step_of_the_papers(seed: int, tmp_path: Path, two: Workers) -> None:
    given = draw_combination(seed, tmp_path)
    name = given.pop("name")
    found, *_ = two("tests.parity.cases:one_step", samples=SAMPLES, **given)
    print(name, given["task"], given["kind"], given["changes"]["model"].keys(), given["changes"]["options"])
    # fp32 sums in another order; a gradient of pairs is a difference of like vectors.
    assert compare(given["task"], given["changes"], found) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_ranks_that_share_sequences_take_it_too(task: str, name: str, tmp_path: Path, two: Workers) -> None:
    model = {"config": config_of(name)}
    changes = make_changes(tmp_path, task, model, options=PREFERENCES[0] if task == "dpo" else {}, moved=True)
    changes["parallel"] = {"sequence": 2}
    found, *_ = two(
        "tests.parity.cases:one_step", task=task, kind="zero2", accumulate=2, samples=SAMPLES, changes=changes
    )
    assert compare(task, changes, found) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_adapters_on_nf4_take_it_with_the_values_that_the_codes_stand_for(
    task: str, tmp_path: Path, two: Workers
) -> None:
    """bitsandbytes' own functions quantize the weights that the base would have; the reference computes in fp32."""
    pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")
    bnb = import_bitsandbytes("model.quantize")  # with its CPU kernel mended: these rows are shorter than a block
    model = {"config": config_of("llama"), "lora": LORA}
    changes = make_changes(tmp_path, task, model, options=PREFERENCES[0] if task == "dpo" else {}, moved=True)
    whole = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): value.detach()
        for name, value in tiny_task(task, {key: value for key, value in changes.items() if key != "moved"})
        .build_model()
        .named_parameters()
    }
    base = {}
    for name, value in whole.items():
        if value.ndim == 2 and "_proj" in name:
            codes, state = bnb.functional.quantize_4bit(value, quant_type="nf4", compress_statistics=True)
            value = bnb.functional.dequantize_4bit(codes, state)
        base[name] = value
    changes["model"]["quantize"] = "nf4"
    found, *_ = two(
        "tests.parity.cases:one_step", task=task, kind="zero2", accumulate=1, samples=SAMPLES, changes=changes
    )
    found["before"] = {name: value for name, value in found["before"].items() if ".lora_" in name}
    assert compare(task, {**changes, "model": {**changes["model"], "quantize": None}}, found, base) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo", "rm"])
def test_bf16_is_near_it(task: str, tmp_path: Path, two: Workers) -> None:
    """8 bits of mantissa: a rounding of 0.4 % in each of some ten operations in a row, 2 % of the loss and 5 % of the norm."""
    options = {"dpo": PREFERENCES[0], "rm": {"center_rewards_coefficient": 0.1}}.get(task, {})
    changes = make_changes(tmp_path, task, {"config": config_of("llama")}, options=options, moved=True)
    given = {"task": task, "kind": "zero2", "accumulate": 1, "samples": SAMPLES, "changes": changes}
    exact, *_ = two("tests.parity.cases:one_step", **given)
    compare(task, changes, exact)
    found, *_ = two("tests.parity.cases:one_step", precision="bf16", **given)
    assert found["sums"][0] == pytest.approx(exact["sums"][0], rel=0.02)
    assert found["norm"] == pytest.approx(exact["norm"], rel=0.05)


VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "llava, CLIP": ("<image>", llava()),
    "llava, SigLIP": ("<image>", llava("siglip_vision_model")),
    "gemma3": ("<start_of_image>", GEMMA3),
    "idefics3": ("<image>", IDEFICS3),
}
"""Family -> the text that its processor takes for an image, and the config."""
PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
"""Of a template: contents as texts, or as parts with images."""


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_a_step_on_images_is_that_of_transformers_processor(name: str, kind: str, tmp_path: Path, two: Workers) -> None:
    """Families whose processor is built from the config. Records have an image or none."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    draw, made = random.Random(name), []
    for index in range(NUM_RECORDS):
        picture(index, (40 + index, 30)).save(tmp_path / f"{index}.png")
        asked, shown = sentence(draw), [f"{index}.png"] if index % 3 else []
        turns = [message("user", "<image>" * len(shown) + asked), message("assistant", sentence(draw))]
        made.append({"images": shown, "messages": turns})
    size = len(chat("qwen", "byte-level")) + 8
    token, config = VISION[name]
    config = {**config, "text_config": {**config["text_config"], "vocab_size": size}}
    frozen = ["*.post_layernorm"] if "llava" in name else []  # which reads the layer before it
    changes = make_changes(tmp_path, "sft", {"config": config, "freeze": frozen}, moved=True)
    opened, written = "{{ '<|im_start|>' + message['role'] + '\\n' }}", PARTS.replace("IMAGE", token)
    before, _, after = TEMPLATE.partition(
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    )
    template = f"{before}{opened}{written}{{{{ '<|im_end|>' }}}}{after}"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = str(write_jsonl(tmp_path / "vlm.jsonl", made))
    changes["data"] |= {"train": [{"path": file}], "eval": {"path": file}}
    task: Any = tiny_task("vlm", {key: value for key, value in changes.items() if key != "moved"})
    processor = task.model_source.vision_processor.hf_processor
    rows = []
    for record in [made[index] for index in SAMPLES]:
        asked, answer = (turn["content"] for turn in record["messages"])
        start = f"<|im_start|>user\n{asked.replace('<image>', token)}<|im_end|><|im_start|>assistant\n"
        images = [Image.open(tmp_path / shown).convert("RGB") for shown in record["images"]] or None
        prompt, whole = (
            processor(text=[text], images=images, return_tensors="pt") for text in (start, f"{start}{answer}<|im_end|>")
        )
        length, ids = prompt["input_ids"].shape[1], whole["input_ids"][0].tolist()
        more = {key: value for key, value in whole.items() if key not in ("input_ids", "attention_mask")}
        rows.append(Row(ids, [at >= length for at in range(len(ids))], more))
    found, *_ = two(
        "tests.parity.cases:one_step", task="vlm", kind=kind, accumulate=1, samples=SAMPLES, changes=changes
    )
    full = task.model_source.build_config(task.recipe.model)
    module = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**full.to_dict()), attn_implementation="eager"
    )
    model = Model(module, found["before"], 1.0)
    total, weight, gradient = step_of_reference("sft", model, None, rows, {})
    assert found["sums"][1] == weight
    assert found["sums"][0] == pytest.approx(total, rel=1e-5)
    assert difference(found["gradient"], gradient) <= 2e-5
