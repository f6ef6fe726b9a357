"""auto packs where nothing is in the way and says why where something is; true insists, and false never packs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dstrain.batch import PackingMode
from dstrain.config.schema import BatchConfig, RunConfig
from dstrain.errors import RecipeError, TaskError
from dstrain.models.attention.packed import enable_packed_attention, has_packed_attention
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.text import resolve_packing
from tests.model_families import family
from tests.vision_recipes import GEMMA3, TEXT, llava, named_recipe


def resolve(find: Any = lambda shares: None, has_pairs: bool = True, untested: str | None = None, **keys: Any) -> Any:
    return resolve_packing(BatchConfig(**keys), find, has_pairs, untested)


def shared_alone(shares_prefixes: bool) -> str | None:
    return "it has windows" if shares_prefixes else None


def test_auto_is_on_where_nothing_is_in_the_way() -> None:
    assert resolve() == PackingMode(True, True)
    assert resolve(has_pairs=False) == PackingMode(True, False)


def test_auto_says_why_it_is_off() -> None:
    assert resolve(lambda shares: "it is a Mamba") == PackingMode(
        False, message="batches are padded, not packed: it is a Mamba"
    )
    mode = resolve(shared_alone)
    assert (mode.is_packed, mode.shares_prefixes) == (True, False)
    assert "it has windows" in mode.message


def test_false_is_off_without_a_word() -> None:
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
def test_true_insists(keys: dict[str, Any], find: Any) -> None:
    with pytest.raises(RecipeError, match=rf"batch\.{next(iter(keys))}: is true, but it .* set it to auto or false"):
        resolve(find, **keys)


def test_sharing_needs_pairs() -> None:
    with pytest.raises(RecipeError, match=r"batch\.prefix_sharing: .* no pairs of answers; leave it out"):
        resolve(has_pairs=False, prefix_sharing=True)


def test_padded_rows_share_nothing() -> None:
    with pytest.raises(RecipeError, match=r"batch\.prefix_sharing: is true, but batch\.packing is false"):
        resolve(packing=False, prefix_sharing=True)


def test_methods_of_a_task_file_are_packed_only_if_asked_for() -> None:
    assert resolve(untested="`loss` of the task file").message.endswith("`loss` of the task file")
    assert resolve(untested="`loss` of the task file", packing=True) == PackingMode(True, True)


MEMBERS = {
    "dpo.DPO": "def reference_outputs(self, model, batch): return super().reference_outputs(model, batch)",
    "rm.RewardModel": "def scores(self, model, batch): return super().scores(model, batch)",
    "kto.KTO": "def step_stats(self, model, batch): return super().step_stats(model, batch)",
    "sft.SFT": "loss_inputs = property(lambda self: super(Own, self).loss_inputs)",
}


@pytest.mark.parametrize("base", MEMBERS)
def test_members_of_a_task_file_that_read_rows_get_padded_ones(base: str, tmp_path: Path) -> None:
    module, name = base.split(".")
    file = tmp_path / "own.py"
    file.write_text(
        f"from dataclasses import dataclass\nfrom dstrain.tasks.{module} import {name}\n\n"
        f"@dataclass(frozen=True, kw_only=True)\nclass Own({name}):\n    {MEMBERS[base]}\n"
    )
    recipe = named_recipe(module, tmp_path)[1] | {"task": str(file)}
    made: Any = make_task(RunConfig.model_validate(recipe))
    assert not made.packing.is_packed
    assert "of the task file may expect padded rows" in made.packing.message
    forced: Any = make_task(RunConfig.model_validate(recipe | {"batch": {**recipe["batch"], "packing": True}}))
    assert forced.packing.is_packed


def task(folder: Path, name: str, **sections: Any) -> Task:
    recipe = named_recipe(name, folder)[1]
    for key, value in sections.items():
        recipe[key] = {**recipe.get(key, {}), **value}
    return make_task(RunConfig.model_validate(recipe))


@pytest.mark.parametrize("name", ["rm", "dpo", "sft", "kto"])
def test_a_llama_is_packed_by_default(name: str, tmp_path: Path) -> None:
    made: Any = task(tmp_path, name)
    assert made.packing == PackingMode(True, name in ("rm", "dpo"))
    assert not [line for line in made.checks.info_messages() if "pack" in line]


@pytest.mark.parametrize("name", ["dpo", "sft", "kto"])
def test_the_form_is_decided_where_it_is_asked_for(name: str, tmp_path: Path) -> None:
    """The launcher of `dstrain prepare` asks for the frozen models only, and imports no torch."""
    made: Any = task(tmp_path, name)
    inputs = made.loss_inputs
    assert not {"model_source", "packing"} & vars(made).keys()
    assert inputs.packing() == PackingMode(True, name == "dpo")


@pytest.mark.parametrize("name", ["vlm", "docqa", "rm, with images", "dpo, with images"])
def test_so_is_a_llava(name: str, tmp_path: Path) -> None:
    made: Any = task(tmp_path, name)
    assert made.packing == PackingMode(True, made.has_pairs)


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "images read in both directions": ("dpo, with images", {"model": {"config": GEMMA3}}, "gemma3 .*images"),
    "a text model that is not compared": (
        "vlm",
        {"model": {"config": llava(text_config={"model_type": "gemma2", **TEXT})}},
        "llava around gemma2",
    ),
    "corrupted images": ("dpo, safe, with images", {}, "corrupted images"),
    "a family": ("sft", {"model": {"config": family("mamba2")}}, "mamba2"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_in_the_way_is_told_at_start_or_refused(case: str, tmp_path: Path) -> None:
    name, sections, reason = UNSUPPORTED[case]
    made: Any = task(tmp_path, name, **sections)
    assert not made.packing.is_packed
    lines = [line for line in made.checks.info_messages() if line.startswith("batches are padded, not packed: ")]
    assert len(lines) == 1
    assert re.search(reason, lines[0])
    forced: Any = task(tmp_path, name, **sections, batch={"packing": True})
    with pytest.raises(RecipeError, match=rf"batch\.packing: is true, but .*{reason}"):
        forced.checks.run()


@pytest.mark.parametrize("name", ["temporal", "protein"])
def test_tasks_that_cannot_pack_refuse_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=rf"batch\.packing: is true, but task {name} has padded rows only"):
        task(tmp_path, name, batch={"packing": True})


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
    task(tmp_path, "sft").tokenizer.save_pretrained(str(folder))  # type: ignore[attr-defined]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama"))).save_pretrained(str(folder))
    (folder / "modeling_own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnLlama"}
    (folder / "config.json").write_text(json.dumps(config))
    model = {"config": None, "path": str(folder), "trust_remote_code": is_trusted}
    made: Any = task(tmp_path, "sft", model=model)
    assert made.packing.is_packed is not is_trusted
    if is_trusted:
        assert "the model runs code that came with its weights" in made.packing.message
        built = made.build_model()
        enable_packed_attention(built)
        assert not has_packed_attention(built)


def test_the_reference_has_a_say(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    made: Any = task(tmp_path, "dpo")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("mamba2"))).save_pretrained(str(tmp_path / "other"))
    made.tokenizer.save_pretrained(str(tmp_path / "other"))
    other: Any = task(tmp_path, "dpo", options={"ref_model": str(tmp_path / "other")})
    assert not other.packing.is_packed
    assert "of options.ref_model:" in other.packing.message
