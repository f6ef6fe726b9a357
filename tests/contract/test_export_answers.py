"""An export answers and stops in plain transformers as `dstrain generate` answers and stops here."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.commands import export
from dstrain.commands.export import export_model
from dstrain.commands.generate import GenerateJob
from dstrain.commands.publish import Publication
from dstrain.commands.trained_model import ModelSelector
from dstrain.distributed.world import SingleProcessWorld
from dstrain.ds_config import Device
from dstrain.errors import CheckpointError
from dstrain.training import export_folder
from dstrain.training.export_answers import ProbeAnswers
from tests.cells import SLOW
from tests.chat_templates import QWEN, chat
from tests.contract.export_cases import make_run
from tests.vision_recipes import GEMMA3, IDEFICS3, picture
from tests.vocabulary import write_jsonl

THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
QUESTIONS = ["where is the dog?", "the quick brown fox jumps over the river"]
NEW_TOKENS = 24


def make_base(folder: Path, template: str = QWEN, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """Save a base model whose EOS is not what its chat template writes after an answer; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = chat("qwen", "byte-level")
    tokenizer.chat_template = template
    tokenizer.pad_token, tokenizer.padding_side = "<unk>", "right"
    settings = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**settings, **config}))
    with torch.no_grad():  # so that it is the likeliest token now and then
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def run_of(folder: Path, base: Path, task: str = "sft", **model: Any) -> Path:
    """Return a run with one checkpoint of a perturbed base."""
    named = {"path": str(base), "config": None, "tokenizer": None}
    return make_run(folder / "it", task, {"model": named | model, "data": {"max_length": 256}})


def answer_here(folder: Path) -> list[tuple[str, bool]]:
    """Return (answer, whether it ended) of each question, in `dstrain generate`."""
    job = GenerateJob(
        selector=ModelSelector(folder=folder, step="last"), texts=QUESTIONS, sampling={"max_new_tokens": NEW_TOKENS}
    )
    rows = job.run(job.prepare(1, Device("cpu", True)), SingleProcessWorld())
    return [(row["answer"], row["tokens"] < NEW_TOKENS) for row in rows]


def answer_elsewhere(folder: Path) -> list[tuple[str, bool]]:
    """Return the same from transformers and peft alone, in one padded batch, with nothing but what the folder says."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    auto: Any = AutoModelForCausalLM if (folder / "config.json").is_file() else AutoPeftModelForCausalLM
    model, tokenizer = auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in QUESTIONS],
        add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    config = GenerationConfig.from_pretrained(folder)
    written = model.generate(
        **{name: inputs[name] for name in ("input_ids", "attention_mask")},
        generation_config=config, do_sample=False, max_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    rows = written[:, inputs["input_ids"].shape[1] :]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [(tokenizer.decode(row, skip_special_tokens=True), bool(set(row.tolist()) & set(ends))) for row in rows]


BASES: dict[str, dict[str, Any]] = {
    "a base model": {},
    "a list of ends": {"generation": {"eos_token_id": [2, 5], "bos_token_id": 1}},
    "defaults for sampling": {"generation": {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 2}},
    "a temperature without sampling": {"generation": {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}},
    "a penalty": {"generation": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "eos_token_id": 2}},
    "another EOS in the config": {"eos_token_id": 5},
    "a router whose logits are asked for": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("lora", [None, "merged", SLOW("adapters")])
def test_an_export_answers_and_stops_elsewhere_as_here(kind: str, lora: str | None, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **BASES[kind])
    run = run_of(tmp_path, base, **({"lora": {"rank": 4}} if lora else {}))
    report = export_model(run, "last", tmp_path / "out", merge_lora=lora == "merged")
    assert "plain transformers answers as here, and stops at 2, " in report.describe(tmp_path / "out", Publication())
    if "router" in kind and lora == "adapters":
        return  # the base's own config, which transformers cannot generate with
    told = json.loads((tmp_path / "out/generation_config.json").read_text())
    before = json.loads((base / "generation_config.json").read_text())
    ends = before["eos_token_id"] if isinstance(before["eos_token_id"], list) else [before["eos_token_id"]]
    tokenizer = chat("qwen", "byte-level")
    assert told["eos_token_id"] == sorted(
        {*ends, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    )
    ignored = ("eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
    assert {key: told.get(key) for key in before if key not in ignored} == {
        key: value for key, value in before.items() if key not in ignored
    }
    here = answer_here(run)
    assert any(is_ended for _, is_ended in here)
    assert here == answer_elsewhere(tmp_path / "out")
    assert here == answer_here(tmp_path / "out")


def test_a_thinking_switch_leaves_with_the_model(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", THINKING)
    run = run_of(tmp_path, base, chat_template_kwargs={"enable_thinking": False})
    export_model(run, "last", tmp_path / "out")
    assert answer_here(run) == answer_elsewhere(tmp_path / "out")
    from transformers import AutoTokenizer

    asked = [{"role": "user", "content": QUESTIONS[0]}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "</think>" in tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert tokenizer.padding_side == "left"


def test_a_run_on_rendered_texts_is_exported(tmp_path: Path) -> None:
    """Prompts are taken as they are there; the proof asks through the template."""
    rows = [{"prompt": "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n", "completion": "dog<|im_end|>"}] * 4
    file = str(write_jsonl(tmp_path / "rendered.jsonl", rows))
    changes = {"data": {"max_length": 256, "rendered": True, "train": [{"path": file}], "eval": {"path": file}}}
    named = {"path": str(make_base(tmp_path / "base")), "config": None, "tokenizer": None}
    run = make_run(tmp_path / "it", "sft", {"model": named, **changes})
    export_model(run, "last", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 7]


@pytest.mark.parametrize("task", ["dpo", SLOW("kto"), SLOW("distill")])  # both as dpo
def test_every_task_that_trains_answers_writes_their_end(task: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    named = {"path": str(base), "config": None, "tokenizer": None}
    more = {"options": {"teacher": str(base)}} if task == "distill" else {}
    run = make_run(tmp_path / "it", task, {"model": named, "data": {"max_length": 256}, **more})
    export_model(run, "last", tmp_path / "out")
    assert (
        chat("qwen", "byte-level").convert_tokens_to_ids("<|im_end|>")
        in json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"]
    )


@pytest.mark.parametrize("kind", ["llava", SLOW("gemma3"), SLOW("idefics3")])  # one family of three
def test_images_are_read_elsewhere_as_here(kind: str, tmp_path: Path) -> None:
    """The proof of the export reads an image with the folder's processor."""
    config = {"llava": None, "gemma3": GEMMA3, "idefics3": IDEFICS3}[kind]
    run = make_run(
        tmp_path / "it", "vlm", {"data": {"max_length": 128}, **({"model": {"config": config}} if config else {})}
    )
    export_model(run, "last", tmp_path / "out")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    picture(1).save(tmp_path / "one.png")
    selector = ModelSelector(folder=run, step="last")
    job = GenerateJob(
        selector=selector, texts=["what"], images=[str(tmp_path / "one.png")], sampling={"max_new_tokens": 8}
    )
    ready = job.prepare(1, Device("cpu", True))
    (row,) = job.run(ready, SingleProcessWorld())
    inputs = processor(text=[ready.prompts[0].text], images=[picture(1)], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ready.prompts[0].ids
    written = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert processor.tokenizer.decode(written, skip_special_tokens=True) == row["answer"]


def test_a_template_that_reads_only_parts_is_exported(tmp_path: Path) -> None:
    """Such as those of Idefics 3, SmolVLM and LLaVA-OneVision: a content that is a text is lost in them."""
    template = (
        "{% for message in messages %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    run = make_run(tmp_path / "it", "vlm", {"data": {"max_length": 128}, "model": {"chat_template": template}})
    export_model(run, "last", tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == template


def test_what_would_answer_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, make_base(tmp_path / "base"))
    write = export_folder.write_generation_config

    def forget_end(config: Any, tokenizer: Any, folder: Path) -> None:
        write(config, tokenizer, folder)
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')

    def penalize(config: Any, tokenizer: Any, folder: Path) -> None:
        write(config, tokenizer, folder)
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 50.0}))

    def lose_template(config: Any, tokenizer: Any, folder: Path) -> None:
        write(config, tokenizer, folder)
        (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    for change, words in (
        (forget_end, r"generation_config.json ends answers at \[2\], dstrain at \[2, 7\]"),
        (penalize, "plain transformers does not answer as dstrain does"),
        (lose_template, "the exported tokenizer writes a prompt as"),
    ):
        monkeypatch.setattr(export_folder, "write_generation_config", change)
        with pytest.raises(CheckpointError, match=words):
            export_model(run, "last", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_probe_costs_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProbeAnswers] = []
    check = export.check_answers
    monkeypatch.setattr(export, "check_answers", lambda *words: (seen.append(words[0]), check(*words)))
    export_model(run_of(tmp_path, make_base(tmp_path / "base")), "last", tmp_path / "out")
    (probe,) = seen
    assert len(probe.prompts) == 2
    assert probe.max_new_tokens == 12


def test_scores_have_no_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "it", "rm")
    export_model(run, "last", tmp_path / "out")
    assert not (tmp_path / "out/generation_config.json").exists()


def test_the_card_says_what_ends_an_answer(tmp_path: Path) -> None:
    run = run_of(tmp_path, make_base(tmp_path / "base"), lora={"rank": 4})
    export_model(run, "last", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "## Generation" in card
    assert "&lt;|im" in card.replace("\\", "") or "<|im_end|>" in card
    assert "GenerationConfig.from_pretrained" in card


def test_a_run_folder_has_the_end_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, make_base(tmp_path / "base"))
    told = json.loads((run / "model/generation_config.json").read_text())
    assert told["eos_token_id"] == [2, 7]


@pytest.mark.parametrize("merge", [False, True])
def test_peft_warns_of_nothing_that_is_done_here(merge: bool, tmp_path: Path) -> None:
    """Of adapters on an embedding that is the output layer too, which a merge unties."""
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    run = run_of(tmp_path, base, lora={"rank": 4, "targets": ["embed_tokens", "q_proj"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = export_model(run, "last", tmp_path / "out", merge_lora=merge)
    assert (tmp_path / "out" / "adapter_config.json").is_file() is not merge
    assert report.stop_ids


def test_the_answers_of_a_template_that_writes_the_time_are_compared_at_that_of_the_run(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "{{ strftime_now('%d %b %Y') }}\n" + QWEN)
    run = run_of(tmp_path, base, chat_template_time="2020-01-31T00:00:00")
    export_model(run, "last", tmp_path / "out")
    written = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert written.startswith("{{ strftime_now('%d %b %Y') }}"), "a server writes its own day"
