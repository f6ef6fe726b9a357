"""What a model's folder says of itself before anything starts: config.json, tokenizer files, adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.config.schema import RunConfig
from dstrain.errors import RecipeError
from dstrain.models.checks import ModelValidator, max_positions, read_folder_config, rope_length_warning
from dstrain.models.folder import (
    BIDIRECTIONAL_TYPES,
    LEARNED_POSITION_TYPES,
    PAD_OFFSET_TYPES,
    check_local_folder,
    max_learned_positions,
    wrong_size_fault,
)
from dstrain.planner.shapes import named_config, shape_names
from dstrain.tasks import make_task
from tests.tiny import tiny_recipe

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
ADAPTER = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/base"}


def folder(at: Path, **config: Any) -> Path:
    """A model's folder as far as its small files go."""
    at.mkdir()
    (at / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (at / "tokenizer.json").write_text("{}")
    (at / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return at


def recipe(path: Path | str, task: str = "sft", **options: Any) -> RunConfig:
    data = {"train": "x.jsonl", "max_length": 48}
    return RunConfig.model_validate(
        {"task": task, "model": {"path": str(path)}, "data": data, "steps": 1, "options": options}
    )


def faults(path: Path | str, task: str = "sft", **options: Any) -> str:
    return "; ".join(map(str, make_task(recipe(path, task, **options)).checks.model_faults()))


def test_a_whole_folder_and_a_hub_id_pass(tmp_path: Path) -> None:
    for task in ("sft", "rm", "dpo"):
        assert not faults(folder(tmp_path / task), task)
    assert not faults("org/name")


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda at: void((at / name).write_text(text))


def void(_: object) -> None:
    return None


def only(name: str, text: str) -> Callable[[Path], None]:
    """Nothing but this file."""

    def change(at: Path) -> None:
        for file in at.iterdir():
            file.unlink()
        (at / name).write_text(text)

    return change


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda at: (at / "config.json").unlink(), r"holds no config\.json"),
    "cut JSON": (write("config.json", "{"), r"config\.json is not valid JSON"),
    "a list": (write("config.json", "[]"), r"config\.json holds no JSON object"),
    "a pointer": (write("config.json", LFS), r"Git LFS pointer"),
    "no type": (write("config.json", "{}"), r"has no model_type in its config\.json"),
    "an unknown type": (write("config.json", '{"model_type": "lama"}'), r"'lama', which transformers .* did you mean 'llama'"),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), r"model\.path: there is no tokenizer in '.*'; set model\.tokenizer"),
    "an empty tokenizer": (write("tokenizer.json", ""), r"tokenizer\.json is empty"),
    "a pointer as tokenizer": (write("tokenizer.json", LFS), r"tokenizer\.json is a Git LFS pointer"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), r"holds no weights"),
    "an index that leads outside": (
        write("model.safetensors.index.json", '{"weight_map": {"a": "../other/model.safetensors"}}'),
        r"names a file outside its folder: '\.\./other/model\.safetensors'",
    ),
    "an index that names what is not there": (
        write("model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}'), r"model-1\.safetensors is missing",
    ),
    "a run folder": (lambda at: (only("recipe.yaml", "")(at), (at / "checkpoints").mkdir())[1], r"is a run folder.* dstrain export"),
    "GGUF": (only("m.gguf", "GGUF"), r"holds GGUF files"),
    "an encoder": (write("config.json", '{"model_type": "bert"}'), r"a bert model attends in both directions.*is_decoder"),
    "GPT-2": (
        write("config.json", '{"model_type": "gpt2", "n_positions": 32}'), r"data\.max_length: is 48, but the model has only 32 learned positions",
    ),
    "RoBERTa": (
        write("config.json", '{"model_type": "roberta", "max_position_embeddings": 40, "pad_token_id": 1, "is_decoder": true}'),
        r"only 38 learned positions; write 38 or less",
    ),
    "adapters of another kind": (only("adapter_config.json", json.dumps({**ADAPTER, "peft_type": "IA3"})), r"is a IA3 adapter of org/base, which"),
    "an adapter without weights": (only("adapter_config.json", json.dumps(ADAPTER)), r"a LoRA adapter of org/base, but adapter_model"),
    "an adapter beside weights": (write("adapter_config.json", json.dumps(ADAPTER)), r"but the folder also holds complete weights \(model\.safetensors\)"),
    "an adapter that changes its base": (
        only("adapter_config.json", json.dumps({**ADAPTER, "init_lora_weights": "pissa"})), r"init_lora_weights: pissa .*--merge-lora",
    ),
    "an adapter with a setting that is not known": (
        only("adapter_config.json", json.dumps({**ADAPTER, "megatron_config": {"a": 1}})), r"its megatron_config: .* is not supported",
    ),
    "an adapter of nothing": (only("adapter_config.json", '{"peft_type": "LORA"}'), r"without the name of its base model"),
    "an adapter that is no JSON": (only("adapter_config.json", "{"), r"adapter_config\.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_folder_is_refused_in_one_sentence(odd: str, tmp_path: Path) -> None:
    import re

    change, wanted = ODD[odd]
    at = folder(tmp_path / "model")
    change(at)
    said = faults(at)
    assert re.search(wanted, said)
    assert "\n" not in said
    with pytest.raises(RecipeError, match=wanted):  # what `train` calls before its launch
        make_task(recipe(at)).checks.required_keys()


def test_an_adapter_stands_on_its_base(tmp_path: Path) -> None:
    at = tmp_path / "adapter"
    at.mkdir()
    (at / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    for base, wanted in (
        (tmp_path / "gone", "is a LoRA adapter of .*gone, which does not exist"),
        (at, "which is an adapter as well"),
        (folder(tmp_path / "small", model_type="gpt2", n_positions=32), "only 32 learned positions"),
    ):
        (at / "adapter_config.json").write_text(json.dumps({**ADAPTER, "base_model_name_or_path": str(base)}))
        import re

        assert re.search(wanted, faults(at))
    (at / "adapter_config.json").write_text(
        json.dumps({**ADAPTER, "base_model_name_or_path": str(folder(tmp_path / "good"))})
    )
    assert not faults(at)  # with the tokenizer of its base


def test_what_another_task_needs_is_told_of_its_own_key(tmp_path: Path) -> None:
    assert not faults(folder(tmp_path / "bert", model_type="bert"), "rm")
    text_model = folder(tmp_path / "llama")
    for task in ("vlm", "docqa"):
        assert f"llama is a text-only model; task {task} needs" in faults(text_model, task)
        assert "attends in both directions" in faults(tmp_path / "bert", task)
    seeing = folder(tmp_path / "llava", model_type="llava", vision_config={})
    assert not faults(seeing, "vlm")
    assert faults(tmp_path / "llama", "dpo", ref_model="./nowhere").startswith(
        "options.ref_model: './nowhere' is not a folder"
    )
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in faults(tmp_path / "file")
    long = f"./{'a' * 300}"  # os.stat refuses it, as it does a path that may not be read
    assert "is not a folder" in faults("org/name", "dpo", ref_model=long)


def test_a_task_file_derived_from_vlm_needs_a_vision_model_too(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom dstrain.tasks.vlm import VLM\n@dataclass(frozen=True)\nclass Own(VLM):\n    pass\n"
    )
    assert f"llama is a text-only model; task {own} needs" in faults(folder(tmp_path / "llama"), str(own))


def test_no_permission_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = folder(tmp_path / "model")
    opened = Path.open

    def refuse(path: Path, *words: Any, **more: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(path, *words, **more)

    monkeypatch.setattr(Path, "open", refuse)
    assert "model.safetensors cannot be read (Permission denied); check the permissions of the file" in faults(at)


def test_the_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    lines = (
        "import sys; from dstrain.config.schema import RunConfig; from dstrain.models.checks import check_model",
        f"c = RunConfig.model_validate({recipe(folder(tmp_path / 'model')).model_dump(mode='json')!r})",
        "assert not check_model(c); print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", sorted(LEARNED_POSITION_TYPES | PAD_OFFSET_TYPES))
def test_positions_by_config_alone_are_those_of_the_model(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 1)
    auto = transformers.AutoModelForSequenceClassification
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    assert max_learned_positions({**config.to_dict(), "model_type": kind}) == max_positions(model, config)


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("kind", sorted(BIDIRECTIONAL_TYPES - {"reformer", "big_bird"}))
def test_encoders_see_what_follows_unless_they_are_decoders(kind: str) -> None:
    more = {"languages": ["en"], "default_language": "en"} if kind == "xmod" else {}
    more = {"input_embedding_size": 16, "output_embedding_size": 16} if kind == "rembert" else more
    for is_decoder in (False, True):
        config = transformers.AutoConfig.for_model(kind, **SMALL, **more, is_decoder=is_decoder)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            one, other = (model(input_ids=torch.tensor([[5, 6, 7, last]])).logits[0, :3] for last in (8, 9))
        assert torch.allclose(one, other) == is_decoder


@pytest.mark.parametrize("key", ["model.path", "options.ref_model"])
def test_kernels_of_the_hub_are_found_before_anything_starts(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "_attn_implementation": "evil/kernel"}')
    path = str(tmp_path) if key == "model.path" else str(folder(tmp_path / "other"))
    options = {"ref_model": str(tmp_path)} if key == "options.ref_model" else {}
    recipe: dict[str, Any] = {
        "task": "dpo",
        "data": {"train": "train.jsonl"},
        "model": {"path": path},
        "options": options,
    }
    wanted = f"in the config of '{tmp_path}' _attn_implementation names code on the Hub ('evil/kernel')"
    found = [
        fault
        for fault in make_task(RunConfig.model_validate(recipe)).checks.model_faults()
        if "names code" in fault.problem
    ]
    assert [(fault.where, fault.problem) for fault in found] == [(key, wanted)]
    recipe["model"]["trust_remote_code"] = True
    assert not [
        fault
        for fault in make_task(RunConfig.model_validate(recipe)).checks.model_faults()
        if "names code" in fault.problem
    ]


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("xlnet", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
     ("xlm", {"vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
     ("cpmant", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "dim_head": 8,
                 "dim_ff": 64}),
     *((name, SIZES | {"use_bidirectional_attention": True}) for name in ("gemma", "gemma3_text")),
     ("llama", SIZES | {"is_causal": False})],
)  # fmt: skip
def test_models_that_see_their_targets_are_refused(model_type: str, sizes: dict[str, Any]) -> None:
    """formats.md A7: XLNet and CPM-Ant trained on targets that they see, with exit code 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    with torch.no_grad():
        one, other = (model(input_ids=torch.tensor([[8, 9, 10, last]])).logits[0, -4:-1] for last in (11, 12))
    assert not torch.allclose(one, other)
    recipe = RunConfig.model_validate({"task": "sft", "model": {"config": {"model_type": model_type}}})
    with pytest.raises(RecipeError, match=f"{model_type} models see the tokens that they have to predict"):
        ModelValidator(recipe, (), True).check(model)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "task", "micro", "max_length", "refused"),
    [
        (LONGROPE, "sft", 2, 65, "longrope positions depend on the longest row of a batch above 64 tokens"),
        (LONGROPE, "sft", 2, 64, ""),
        (LONGROPE, "sft", 1, 65, ""),
        (LONGROPE, "dpo", 1, 65, "lower it to 64"),
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "sft",
            1,
            257,
            "the longest row that was seen above 256",
        ),
        ({"rope_type": "default", "rope_theta": 1e4}, "sft", 8, 1000, ""),
    ],
)
def test_positions_that_depend_on_other_rows_are_refused(
    rope: dict[str, object], task: str, micro: int, max_length: int, refused: str
) -> None:
    """training.md 3: the loss of a step depended on batch.micro, and so on the number of processes."""
    from dstrain.config import RunConfig
    from dstrain.errors import RecipeError
    from dstrain.models.checks import check_length_dependent
    from dstrain.tasks import find_task

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    own = {"original_max_position_embeddings": 64, "pad_token_id": 0} if rope is LONGROPE else {}
    config = AutoConfig.for_model("phi3" if own else "llama", **sizes, **own, rope_parameters=rope)
    recipe = RunConfig.model_validate(
        {"task": task, "data": {"max_length": max_length}, "batch": {"total": 8, "micro": micro}}
    )
    rows = find_task(task).rows_per_sample  # type: ignore[attr-defined]
    if not refused:
        check_length_dependent(config, recipe, rows)
        return
    with pytest.raises(RecipeError, match=refused):
        check_length_dependent(config, recipe, rows)


# A sequence longer than a model's table of positions is refused before anything starts.


LIMITS: dict[str, tuple[dict[str, Any], int | None]] = {
    "gpt2": ({"n_positions": 32}, 32),
    "bert": ({"max_position_embeddings": 40}, 40),
    "roberta": ({"max_position_embeddings": 42, "pad_token_id": 1}, 40),
    "mpnet": ({"max_position_embeddings": 42}, 40),
    "opt": ({"max_position_embeddings": 40}, 40),
    "bart": ({"max_position_embeddings": 40}, 40),
    "nystromformer": ({"max_position_embeddings": 40}, 40),
    "deberta-v2": ({"max_position_embeddings": 40}, 40),
    "deberta-v2, relative alone": (
        {"max_position_embeddings": 40, "position_biased_input": False, "relative_attention": True, "pos_att_type": "p2c|c2p"},
        None,
    ),
    "gptj": ({"n_positions": 40, "n_embd": 32, "n_head": 2, "rotary_dim": 4, "n_layer": 1}, 40),
    "xlm": ({"max_position_embeddings": 40}, 40),
    "bloom": ({}, None),
    "llama": ({"max_position_embeddings": 40}, None),
    "t5": ({}, None),
    "llava": ({}, None),  # its tower has 577
    "blip-2": ({}, 2048),  # its OPT has 2050, its tower fewer
}  # fmt: skip


@pytest.mark.parametrize("family", LIMITS)
def test_the_table_tells_how_many_tokens_fit(family: str) -> None:
    values, limit = LIMITS[family]
    config = transformers.AutoConfig.for_model(family.split(",")[0], **values)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    assert max_positions(model, config) == limit


@pytest.mark.parametrize(("length", "fits"), [(32, True), (33, False)])
def test_a_task_refuses_what_would_be_out_of_range(length: int, fits: bool, tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    values["model"]["config"] = {
        "model_type": "gpt2",
        "vocab_size": 320,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
    }
    values["data"]["max_length"] = length
    task = make_task(RunConfig.model_validate(values))
    if fits:
        task.checks.run()
        return
    with pytest.raises(
        RecipeError, match=r"^data\.max_length: is 33, but the model has only 32 learned positions; write 32 or"
    ):
        task.checks.run()


def test_rotary_positions_are_warned_of(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path)
    values["model"]["config"]["max_position_embeddings"] = 40
    task = make_task(RunConfig.model_validate(values))
    task.checks.run()
    [line] = task.checks.warnings()
    assert "data.max_length is 48" in line
    assert "up to 40 tokens" in line
    assert not rope_length_warning(transformers.AutoConfig.for_model("llama", max_position_embeddings=48), 48)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_labels": 10**10}, "num_labels is 10000000000 in its config"),
        ({"num_unknown_things": 10**6}, "num_unknown_things is 1000000 in its config"),
        ({"unknown": -(10**12)}, "unknown is -1000000000000 in its config"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001 in its config"),
        ({"encoder_layers": 10_001}, "encoder_layers is 10001 in its config"),
        ({"hidden_size": 0}, "hidden_size is 0 in its config"),
        ({"hidden_size": True}, "hidden_size is True in its config"),
        ({"text_config": {"more": {"hidden_size": -1}}}, "hidden_size is -1 in its config"),
        ({"depths": [1, 2, 10**6]}, "depths is 1000000 in its config"),
        ({"id2label": {str(number): "x" for number in range(100_001)}}, "id2label has 100001 entries in its config"),
        ({"layer_types": ["full_attention"] * 100_001}, "layer_types has 100001 entries in its config"),
        ({"a": [[[0] * 100] * 101] * 100}, "its config holds more than a million values"),
        ({"hidden_size": 10**10}, "hidden_size is 10000000000 in its config"),
    ],
)
def test_every_number_list_and_map_of_a_config_is_bounded(values: dict[str, Any], problem: str) -> None:
    fault = wrong_size_fault(values, "model.path")
    assert fault is not None
    assert fault.problem == problem


def test_configs_of_models_are_within_the_bounds() -> None:
    for name in shape_names():
        assert wrong_size_fault(named_config(name), "model.path") is None
    values = {
        "pad_token_id": -1, "rope_theta": 10**10, "max_position_embeddings": 10_485_760, "vocab_size_per_layer_input": 262_144,
        "image_token_index": 256_000, "num_key_value_heads": None, "tie_word_embeddings": True, "n_inner": None,
        "attention_window": [512] * 12, "id2label": {str(number): "x" for number in range(21_843)}, "ngram_vocab_size_base": 20_000_000,
    }  # fmt: skip
    assert wrong_size_fault(values, "model.path") is None


@pytest.mark.parametrize(
    "name", ["my models/llama", "-x", "org/name:te st", "a\x1b[31m/b", "a--b", "a/b.git", "C:\\llama", "\udcfc"]
)
def test_a_name_that_the_hub_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(
        RecipeError, match="is not a folder, and no name of a model on the Hub; give an existing folder"
    ):
        read_folder_config(name, "model.path")
    with pytest.raises(RecipeError, match="no name of a model on the Hub"):
        check_local_folder(name, "model.tokenizer")


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "org/name_x.y", "0x22almostEvil/reward"])
def test_a_name_that_the_hub_allows_is_asked_for_there(name: str) -> None:
    assert read_folder_config(name, "model.path") is None
    assert not check_local_folder(name, "model.path")
