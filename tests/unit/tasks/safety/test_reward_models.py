"""Frozen reward models score the pairs of dpo: before training from the cache, or next to the policy, alike."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dstrain.tasks.common.model_source
from dstrain import load_reward_model
from dstrain.config import RunConfig, dump_recipe
from dstrain.data.loading.loader import make_batch
from dstrain.data.token_store import TokenizedDataset
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import BadRecord, DataError, RecipeError
from dstrain.models.params import unwrap_peft
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.pairs import PairTask
from dstrain.tasks.common.task import EXPORT_RECIPE, load_split
from dstrain.tasks.dpo import DPO
from dstrain.tasks.rm import RewardModel
from dstrain.training.build_model import build_model, build_train_module
from dstrain.training.engine.module import with_scores
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs
from tests.contract.lora_cases import save_base
from tests.reward_models import export_reward_model
from tests.tiny import tiny_recipe
from tests.vision_recipes import named_recipe
from tests.vocabulary import invoke, read_jsonl, write_recipe

PLAIN = {"zero_optimization": {"stage": 0}}
WORLD = SingleProcessWorld()
OTHER = tiny_recipe("rm", Path(tempfile.mkdtemp()))["model"]["config"] | {"vocab_size": 290}
"""The config of a model with a tokenizer of its own."""
IDS = [5, 17, 60, 2, 9]
SCORES = ("helpful_chosen", "helpful_rejected", "harmless_chosen", "harmless_rejected")


pytestmark = pytest.mark.usefixtures("fresh_cache")


def policy(folder: Path, safety: dict[str, Any], name: str = "dpo", **sections: Any) -> Task:
    values = named_recipe(name, folder)[1]
    values["data"]["max_length"] = 160  # nothing is truncated
    paths = {key: str(value) if isinstance(value, Path) else value for key, value in safety.items()}
    return make_task(RunConfig.model_validate({**values, **sections, "options": {"safety": paths}}))


def scored(task: Task, split: Any = "train") -> Any:
    job = OutputsJob(task=task, ds_config=PLAIN, micro_batch_size=3, world=WORLD)
    return add_frozen_outputs(job, [load_split(task, split)])[0]


def online_scores(task: Task, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    module = build_train_module(task)
    module.train()
    (batch,) = with_scores(module, [make_batch(load_split(task, "train"), task.collate, [*ids], 0)], WORLD)
    return {name: batch.tensors[name] for name in SCORES if name in batch.tensors}


def test_a_filler_of_a_step_stays_without_weight(tmp_path: Path) -> None:
    every_answer_is_safe = {"harmless_threshold": -100.0}
    safety = {"harmless_rm": export_reward_model(tmp_path), "method": "safedpo", "scoring": "online"}
    task = policy(tmp_path, safety | every_answer_is_safe)
    examples = load_split(task, "train")
    batches = [make_batch(examples, task.collate, IDS, 0), make_batch(examples, task.collate, [], 3)]
    some, filler = with_scores(build_train_module(task), batches, WORLD)
    assert (some.weight, filler.weight) == (len(IDS), 0)


def plain_scores(folder: Path, records: Sequence[dict[str, str]]) -> torch.Tensor:
    """Return (chosen, rejected) of each record, each text alone, from what transformers loads; (N, 2)."""
    from transformers import AutoTokenizer

    model, tokenizer = load_reward_model(folder), AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        rows = [
            [model(**tokenizer(record[side] + tokenizer.eos_token, return_tensors="pt")).logits.item() for side in ("chosen", "rejected")]
            for record in records
        ]  # fmt: skip
    return torch.tensor(rows)


def read_records(task: Task, ids: Sequence[int]) -> list[dict[str, str]]:
    lines = read_jsonl(Path(task.recipe.data.train[0].path))
    dataset: Any = task.examples("train")
    return [lines[dataset[index]["sample"]] for index in ids]


def test_cached_scores_are_those_of_online_models_and_of_transformers(tmp_path: Path) -> None:
    rms = {"helpful_rm": export_reward_model(tmp_path, "helpful"), "harmless_rm": export_reward_model(tmp_path)}
    task = policy(tmp_path, rms)
    examples = scored(task)
    batch = make_batch(examples, task.collate, IDS, 0)
    found = {name: batch.tensors[name] for name in SCORES}
    online = online_scores(policy(tmp_path, rms | {"scoring": "online"}), IDS)
    assert found.keys() == online.keys() == {*SCORES}
    for name in SCORES:
        assert found[name].shape == (len(IDS),)
        torch.testing.assert_close(found[name], online[name], atol=1e-6, rtol=1e-6)
    for name, folder in (("helpful", rms["helpful_rm"]), ("harmless", rms["harmless_rm"])):
        plain = plain_scores(folder, read_records(task, IDS))
        both = torch.stack([found[f"{name}_chosen"], found[f"{name}_rejected"]], 1)
        torch.testing.assert_close(both, plain, atol=1e-6, rtol=1e-6)
        assert both.std() > 0.01, "scores that are all alike would prove nothing"


def test_a_model_with_another_tokenizer_and_template_scores_the_records_as_it_reads_them(tmp_path: Path) -> None:
    folder = export_reward_model(tmp_path, config=OTHER)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    task = policy(tmp_path, {"harmless_rm": folder})
    (folder / "chat_template.jinja").write_text(template)
    examples = scored(task)
    assert isinstance(examples, TokenizedDataset)
    assert examples.aligned_stores["harmless"].store.folder != examples.store.folder
    own: Any = task.loss_inputs.scorers[0].task
    assert own.tokenizer.chat_template == template
    model = load_reward_model(folder)
    for index in IDS:
        (record,) = read_records(task, [index])
        asked, answer = record["chosen"].split("\n\nAssistant: ")
        text = f"[user] {asked.removeprefix(chr(10) * 2 + 'Human: ')}{own.tokenizer.eos_token}[assistant] {answer}{own.tokenizer.eos_token}"
        ids = own.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            wanted = model(ids).logits.item()
        assert examples[index]["harmless_chosen"] == pytest.approx(wanted, abs=1e-5)


def refusing(refused: int) -> Callable[..., Any]:
    """Return an `encode` of pairs that refuses the record whose prompt has this number."""

    def encode(self: Any, samples: list[Any], images: Any) -> list[Any]:
        encoded = PairTask.encode(self, samples, images)
        return [
            BadRecord("its prompt is too long; raise data.max_length")
            if f"number {refused}" in str(sample.prompt)
            else one
            for sample, one in zip(samples, encoded, strict=True)
        ]

    return encode


@pytest.mark.slow
def test_a_record_that_the_policy_alone_refuses_moves_no_other_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_reward_model(tmp_path, config=OTHER)
    whole = scored(policy(tmp_path, {"harmless_rm": folder}))
    scores = {whole[index]["sample"]: whole[index]["harmless_chosen"] for index in range(len(whole))}
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(DPO, "encode", refusing(7))
    data = {**tiny_recipe("dpo", tmp_path)["data"], "on_error": "skip", "max_length": 160}
    fewer = scored(policy(tmp_path, {"harmless_rm": folder}, data=data))
    assert len(fewer) < len(whole)
    for index in range(len(fewer)):
        assert fewer[index]["harmless_chosen"] == pytest.approx(scores[fewer[index]["sample"]], abs=1e-6)


def test_a_pair_that_the_reward_model_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = policy(tmp_path, {"harmless_rm": export_reward_model(tmp_path, config=OTHER)})
    monkeypatch.setattr(RewardModel, "encode", refusing(7))
    wanted = r"options\.safety\.harmless_rm: the reward model cannot score 1 pairs .*\n.*train\.jsonl:8: its prompt is too long"
    with pytest.raises(DataError, match=wanted):
        load_split(task, "train")


def test_the_second_run_finds_the_scores_and_builds_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    load = dstrain.tasks.common.model_source.load_model
    folder = export_reward_model(tmp_path)
    monkeypatch.setattr(dstrain.tasks.common.model_source, "load_model", lambda *args: built.append("") or load(*args))
    first = scored(policy(tmp_path, {"harmless_rm": folder}))
    assert len(built) == 1
    second = scored(policy(tmp_path, {"harmless_rm": folder, "scoring": "cached"}))
    assert len(built) == 1
    assert [first[index]["harmless_chosen"] for index in IDS] == [second[index]["harmless_chosen"] for index in IDS]
    change(folder)
    third = scored(policy(tmp_path, {"harmless_rm": folder}))
    assert len(built) == 2, "other weights are asked again"
    assert third[5]["harmless_chosen"] != first[5]["harmless_chosen"]


def change(folder: Path) -> None:
    """Write other weights into the folder of a reward model."""
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def headless(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if name != "score.weight"}, folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    return folder


def generator(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return folder


def of_task(folder: Path, task: str) -> Path:
    recipe = (folder / EXPORT_RECIPE).read_text().replace("task: rm", f"task: {task}")
    (folder / EXPORT_RECIPE).write_text(recipe)
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "nowhere", r"nowhere' is not a folder .*; give a folder that `dstrain export`"),
    "no export": (lambda folder: without(folder, EXPORT_RECIPE), "holds no dstrain_recipe.yaml"),
    "another task": (lambda folder: of_task(folder, "sft"), "is the export of task sft"),
    "no head in its config": (generator, "holds no score head"),
    "no weights": (lambda folder: without(folder, "model.safetensors"), "holds no weights"),
    "no tokenizer": (
        lambda folder: without(without(folder, "tokenizer.json"), "tokenizer_config.json"),
        "there is no tokenizer",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_folder_that_is_no_reward_model_ends_with_2_before_any_process_group(fault: str, tmp_path: Path) -> None:
    spoil, words = REFUSED[fault]
    folder = spoil(export_reward_model(tmp_path))
    values = tiny_recipe("dpo", tmp_path) | {"options": {"safety": {"harmless_rm": str(folder)}}}
    recipe = write_recipe(tmp_path, values)
    for command in (["train", recipe, "--run-dir", tmp_path / "run", "--dry-run"], ["prepare", recipe]):
        result = invoke(*command)
        assert result.exit_code == 2
        assert "options.safety.harmless_rm: " in result.stderr
        assert re.search(words, result.stderr)
    assert not (tmp_path / "run").exists()


def test_weights_without_the_head_are_refused(tmp_path: Path) -> None:
    task = policy(tmp_path, {"helpful_rm": headless(export_reward_model(tmp_path))})
    with pytest.raises(RecipeError, match=r"^options\.safety\.helpful_rm: .* holds no score head"):
        load_split(task, "train")


def test_a_model_online_has_to_read_the_tokens_of_the_policy(tmp_path: Path) -> None:
    folder = export_reward_model(tmp_path, config=OTHER)
    task = policy(tmp_path, {"harmless_rm": folder, "scoring": "online"})
    with pytest.raises(RecipeError, match=r"is not the policy's; set options\.safety\.scoring: cached"):
        load_split(task, "train")


def test_a_model_online_may_pad_with_another_token(tmp_path: Path) -> None:
    """A reward model of a base that pads with EOS gets another pad token, which ends its texts."""
    folder = export_reward_model(tmp_path)
    kept = scored(policy(tmp_path, {"harmless_rm": folder}))
    shutil.copytree(folder, tmp_path / "tokenizer")
    file = tmp_path / "tokenizer/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "</s>"}))
    model = tiny_recipe("dpo", tmp_path)["model"] | {"tokenizer": str(tmp_path / "tokenizer")}
    task = policy(tmp_path, {"harmless_rm": folder, "scoring": "online"}, model=model)
    assert task.loss_inputs.scorers[0].task.tokenizer.pad_token != task.tokenizer.pad_token
    found = online_scores(task, IDS)["harmless_chosen"].tolist()
    assert found == pytest.approx([kept[index]["harmless_chosen"] for index in IDS], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["cached", "online"])
def test_a_reward_model_that_sees_scores_with_the_images(scoring: str, tmp_path: Path) -> None:
    folder = export_reward_model(tmp_path, name="rm, with images")
    task = policy(tmp_path, {"harmless_rm": folder, "scoring": scoring}, "dpo, with images")
    examples: Any = scored(task)
    if scoring == "cached":
        first = [examples[index]["harmless_chosen"] for index in IDS]
    else:
        first = online_scores(task, IDS)["harmless_chosen"].tolist()
    own: Any = task.loss_inputs.scorers[0].task
    model = own.build_model().eval()
    data: Any = own.examples("train")
    with torch.no_grad():
        wanted = [own.scores(model, own.collate([data[index]])).tolist()[0] for index in IDS]
    assert first == pytest.approx(wanted, abs=1e-5)
    assert any("images" in data[index] and len(data[index]["images"]) for index in IDS)


def test_an_export_of_adapters_scores_with_its_base(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path)
    values["data"]["max_length"] = 160
    save_base(str(tmp_path / "base"), values)
    values["model"] = {"path": str(tmp_path / "base"), "lora": {"rank": 2}}
    trained: Any = make_task(RunConfig.model_validate(values))
    model, folder = build_model(trained), tmp_path / "harmless"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "score" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    model.save_pretrained(str(folder))
    trained.export.save_extras(folder)
    (folder / EXPORT_RECIPE).write_text(dump_recipe(trained.recipe))
    task = policy(tmp_path, {"harmless_rm": folder})
    examples: Any = scored(task)
    data: Any = trained.examples("train")
    model.eval()
    with torch.no_grad():
        inside, batches = unwrap_peft(model), [trained.collate([data[index]]) for index in IDS]
        wanted = [trained.scores(inside, batch).tolist()[0] for batch in batches]
    found = {examples[index]["sample"]: examples[index]["harmless_chosen"] for index in range(len(examples))}
    samples = [data[index]["sample"] for index in IDS]
    assert [found[sample] for sample in samples] == pytest.approx(wanted, abs=1e-5)


def test_a_text_only_reward_model_refuses_records_with_images(tmp_path: Path) -> None:
    task = policy(tmp_path, {"harmless_rm": export_reward_model(tmp_path)}, "dpo, with images")
    with pytest.raises(RecipeError, match=r"is a text-only reward model, and the records have images; train one on"):
        load_split(task, "train")


def test_models_online_are_frozen_in_evaluation_mode_and_in_no_checkpoint(tmp_path: Path) -> None:
    rms = {"helpful_rm": export_reward_model(tmp_path, "helpful"), "harmless_rm": export_reward_model(tmp_path)}
    module = build_train_module(policy(tmp_path, rms | {"scoring": "online"}))
    module.train()
    assert module.model.training
    assert len(module.reward_models) == 2
    assert not any(part.training for part in module.reward_models.modules() if part is not module.reward_models)
    assert not any(parameter.requires_grad for parameter in module.reward_models.parameters())
    assert not any("score" in name for name in (*module.trainable_names, *module.stored_model.shapes()))
    cached = build_train_module(policy(tmp_path, rms))
    assert not len(cached.reward_models), "training holds neither"
