"""A recipe as read: numbers, places, and which saying counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.config import RunConfig, read_recipe, resolve_batch
from dstrain.config.read import dump_yaml, read_yaml
from dstrain.config.resolve import find_learning_changes
from dstrain.config.schema import EvalConfig, ProcessorConfig
from dstrain.errors import RecipeError


def write(folder: Path, text: str) -> Path:
    (folder / "r.yaml").write_text(text)
    return folder / "r.yaml"


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "'1e-5'", "0.00001"])
def test_a_small_rate_is_a_number_however_it_is_written(text: str, tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, f"task: rm\noptim: {{lr: {text}}}")).config.optim.lr == 1e-5
    assert read_recipe(None, [f"optim.lr={text}"], "rm").config.optim.lr == 1e-5


def test_every_fault_has_its_own_line(tmp_path: Path) -> None:
    path = write(tmp_path, "task: rm\noptim:\n  lr: -1\n  betas:\n    - 0.9\n    - 7\nseed: x\ncompile: true\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    places = [fault.where for fault in caught.value.faults]
    assert places == ["r.yaml:3 optim.lr", "r.yaml:6 optim.betas.1", "r.yaml:7 seed", "r.yaml:8 compile"]


def test_a_set_block_takes_the_place_of_what_it_replaces(tmp_path: Path) -> None:
    path = write(tmp_path, "task: rm\noptim:\n  lr: 1\n")
    with pytest.raises(RecipeError, match=r"^--set optim\.eps: "):
        read_recipe(path, ["optim={eps: 0}"])
    assert read_recipe(path, ["optim={eps: 1}"]).config.optim.lr == RunConfig().optim.lr
    assert read_recipe(path, ["optim.eps=1"]).config.optim.lr == 1


def test_options_count_above_sets_and_sets_above_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "task: a\nds_config: zero1\nsteps: 1\n")
    config = read_recipe(path, ["task=b", "ds_config=zero2", "steps=2", "steps=3"], "c", "zero3").config
    assert (config.task, config.ds_config, config.steps) == ("c", "zero3", 3)


def test_an_option_is_a_word_and_no_yaml() -> None:
    assert read_recipe(None, task="rm", ds_config="a: [b").config.ds_config == "a: [b"


@pytest.mark.parametrize("value", ["true", "yes", "off"])
def test_true_is_no_number_and_a_number_may_be_true(value: str) -> None:
    with pytest.raises(RecipeError, match=r"must be a (whole )?number, got "):
        read_recipe(None, [f"seed={value}"], "rm")
    assert read_recipe(None, ["deterministic=off", "log.tensorboard=yes"], "rm").config.deterministic is False
    assert read_recipe(None, ["deterministic=1"], "rm").config.deterministic is True


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("1e3", 1000), ("0o17", 15), ("1_000", 1000)])
def test_numbers_are_those_of_yaml_1_2(text: str, value: int) -> None:
    assert read_recipe(None, [f"steps={text}"], "rm").config.steps == value


@pytest.mark.parametrize("text", ["1e5", "1e-4", "0o17", "010", "1:30", "no", "y", "0x1F", "1_000", "2020-01-01", "~"])
def test_a_written_text_is_read_as_text_by_yaml_1_1_and_1_2(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, dump_yaml({"options": {text: text}}))
    assert read_yaml(path).values == yaml.safe_load(path.read_text()) == {"options": {text: text}}


def test_words_of_yaml_1_1_are_text() -> None:
    assert read_recipe(None, ["data.columns={no: chosen, y: rejected}"], "rm").config.data.columns == {
        "no": "chosen",
        "y": "rejected",
    }


def test_a_shared_block_is_no_fault(tmp_path: Path) -> None:
    text = "task: rm\noptim:\n  groups:\n    head: &slow {lr: 1}\n    tail: *slow\n    neck: {<<: *slow, lr: 2}\n"
    groups = read_recipe(write(tmp_path, text)).config.optim.groups
    assert [groups[name].lr for name in ("head", "tail", "neck")] == [1, 1, 2]


def test_a_recipe_has_the_name_of_its_file_or_of_its_task(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, "task: rm")).name == "r"
    assert read_recipe(None, task="./some/own.py").name == "own"


def test_one_block_for_a_list_is_named_as_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, "task: rm\ndata:\n  train:\n    path: a/b\n    split: 'train[:3]'\n    weigt: 2\n")
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert [fault.where for fault in caught.value.faults] == ["r.yaml:5 data.train.split", "r.yaml:6 data.train.weigt"]


def test_held_out_data_is_a_path_or_a_block() -> None:
    for text in ("a/b", "{path: a/b}"):
        found = read_recipe(None, [f"data.eval={text}"], "rm").config.data.eval
        assert found is not None
        assert (found.path, found.split, found.name) == ("a/b", None, None)
    assert read_recipe(None, ["data.eval="], "rm").config.data.eval is None


def test_a_processor_is_a_name_or_a_block() -> None:
    for text, wanted in (("a/b", "a/b"), ("{normalize: data}", ProcessorConfig(normalize="data")), ("", None)):
        assert read_recipe(None, [f"model.processor={text}"], "rm").config.model.processor == wanted
    with pytest.raises(RecipeError, match=r"model\.processor\.normalise: no such key; did you mean 'normalize'"):
        read_recipe(None, ["model.processor={normalise: data}"], "rm")


def test_an_initialization_that_changes_the_base_is_refused_with_the_reason() -> None:
    with pytest.raises(RecipeError, match=r"model\.lora\.init_lora_weights: no such key; not supported \(init.*PiSSA"):
        read_recipe(None, ["model.lora={init_lora_weights: pissa}"], "rm")


@pytest.mark.parametrize(
    ("tokenizer", "wanted"),
    [
        ("{vocab_size: 257}", "is 257, but a byte-level tokenizer has at least 258 entries; raise it"),
        ("{vocab_size: 15, alphabet: data}", "is 15, but a trained tokenizer has at least 16 entries; raise it"),
        (
            "{vocab_size: 99, alphabet: letters}",
            "^--set model.tokenizer.alphabet: must be 'bytes' or 'data', got 'letters'; ",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(tokenizer: str, wanted: str) -> None:
    with pytest.raises(RecipeError, match=wanted):
        read_recipe(None, [f"model.tokenizer={tokenizer}"], "rm")
    assert read_recipe(None, ["model.tokenizer={vocab_size: 16, alphabet: data}"], "rm")


def test_a_fault_is_one_line_whatever_the_key_is_called(tmp_path: Path) -> None:
    path = write(tmp_path, 'task: rm\n"a\\nb\\e[2J": 1\n')
    with pytest.raises(RecipeError, match=r"^r\.yaml:2 a\\nb\\x1b\[2J: no such key; "):
        read_recipe(path)
    with pytest.raises(RecipeError, match=r"^--set a\\x85b: has no value; "):
        read_recipe(None, ["a\x85b"], "rm")


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(None, [f"seed=[{'1, ' * 999}1]"], "rm")
    assert len(str(caught.value)) < 200


def test_set_into_something_that_is_no_block_says_what_to_write() -> None:
    with pytest.raises(RecipeError, match="batch is not a block of keys in --set; write it as --set batch=VALUE"):
        read_recipe(None, ["batch=true", "batch.micro=1"], "rm")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes("task: rm\nsteps: 3\n".encode("utf-8-sig"))
    assert read_recipe(tmp_path / "r.yaml").config.steps == 3


@pytest.mark.parametrize(
    "text", ["0", "00", "007", "0.5", "0x10", "08", "'010'", "!!str 010", "1_000", "12:70", "a:30"]
)
def test_a_number_that_everybody_reads_alike_is_taken(text: str, tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, f"task: rm\noptions: {{a: {text}}}")).config.options.keys() == {"a"}


def test_the_attention_implementation_may_change_on_resume(tmp_path: Path) -> None:
    before = read_recipe(write(tmp_path, "task: rm\nmodel: {attn_implementation: eager}\n")).config
    after = read_recipe(write(tmp_path, "task: rm\nmodel: {attn_implementation: sdpa}\n")).config
    assert find_learning_changes(before, after) == {}


def test_an_unknown_attention_implementation_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:2 model.attn_implementation: must be one of auto.*got 'flash'"):
        read_recipe(write(tmp_path, "task: rm\nmodel: {attn_implementation: flash}\n"))


# The command line is the later word: a key that it sets takes the place of the file's that excludes it.


MODEL = "model: {config: {model_type: llama}, tokenizer: {vocab_size: 300}}"


def read(folder: Path, text: str, *sets: str) -> RunConfig:
    (folder / "r.yaml").write_text(f"task: rm\n{text}\n")
    return read_recipe(folder / "r.yaml", sets).config


@pytest.mark.parametrize(
    ("text", "sets", "wanted"),
    [
        ("epochs: 3", ["steps=10"], {"steps": 10, "epochs": None}),
        ("steps: 10", ["epochs=0.5"], {"steps": None, "epochs": 0.5}),
        ("steps: 10", ["epochs=null"], {"steps": 10, "epochs": None}),
        ("epochs: 3", ["steps=10", "epochs=null"], {"steps": 10, "epochs": None}),
        ("steps: 10\nepochs: 3", ["steps=20"], {"steps": 20, "epochs": None}),
    ],
)
def test_steps_and_epochs_take_the_place_of_each_other(
    text: str, sets: list[str], wanted: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, text, *sets)
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_held_out_data_is_a_file_or_a_share(tmp_path: Path) -> None:
    data = read(tmp_path, "data: {eval: a/b}", "data.eval_fraction=0.1").data
    assert (data.eval, data.eval_fraction) == (None, 0.1)
    data = read(tmp_path, "data: {eval_fraction: 0.1}", "data.eval=a/b").data
    assert data.eval is not None
    assert data.eval_fraction == 0
    data = read(tmp_path, "data: {eval: a/b}", "data.eval_fraction=0").data
    assert data.eval is not None, "a share of nothing asks for nothing"


def test_a_model_is_loaded_or_built(tmp_path: Path) -> None:
    model = read(tmp_path, MODEL, "model.path=/m").model
    assert (model.path, model.config, model.tokenizer) == ("/m", None, None), (
        "a trained tokenizer fits no loaded weights"
    )
    model = read(tmp_path, "model: {path: /m}", "model.config={model_type: llama}").model
    assert (model.path, model.config) == (None, {"model_type": "llama"})


def test_a_setting_inside_a_config_does_not_unload_the_weights(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.path and model\.config are both set"):
        read(tmp_path, "model: {path: /m}", "model.config.model_type=llama")


def test_both_on_the_command_line_are_refused(tmp_path: Path) -> None:
    for text in ("seed: 0", "steps: 3", "epochs: 3"):
        with pytest.raises(RecipeError, match=r"^--set epochs: epochs and steps are both set; remove one$"):
            read(tmp_path, text, "steps=1", "epochs=1")


@pytest.mark.parametrize(
    ("text", "sets", "wanted"),
    [
        ("{micro: 2, accumulate: 3}", ["batch.total=8"], (8, 2, None)),
        ("{total: 8, accumulate: 2}", ["batch.micro=1"], (8, 1, None)),
        ("{total: 8, micro: 2}", ["batch.accumulate=2", "batch.total=4"], (4, None, 2)),
        ("{total: 8, micro: 2}", ["batch.accumulate=2", "batch.micro=1"], (None, 1, 2)),
        ("{total: 8, micro: 2, accumulate: 4}", ["batch.micro=1"], (8, 1, None)),
        ("{total: 8, micro: 2}", ["batch={micro: 1, accumulate: 1}"], (None, 1, 1)),
        ("{total: 8, accumulate: 2}", ["batch.tokens_per_micro=512"], (8, None, None)),
        ("{total: 8, tokens_per_micro: 512}", ["batch.accumulate=2"], (8, None, 2)),
    ],
)
def test_a_batch_keeps_what_the_command_line_says(
    text: str, sets: list[str], wanted: tuple[int | None, ...], tmp_path: Path
) -> None:
    batch = read(tmp_path, f"batch: {text}", *sets).batch
    assert (batch.total, batch.micro, batch.accumulate) == wanted


def test_accumulate_alone_says_not_what_changes(tmp_path: Path) -> None:
    batch = read(tmp_path, "batch: {total: 8, micro: 2}", "batch.accumulate=2").batch
    with pytest.raises(RecipeError, match=r"^batch\.total: is 8, but micro 2 x accumulate 2 x 1 process = 4; remove "):
        resolve_batch(batch, 1)
    assert resolve_batch(batch, 2).total == 8


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({}, "min"),
        ({"metric": "loss"}, "min"),
        ({"metric": "accuracy"}, "max"),
        ({"metric": "coordinate_loss"}, "min"),
        ({"metric": "calibration_error"}, "min"),
        ({"metric": "accuracy", "best": "min"}, "min"),
    ],
)
def test_the_metric_says_what_is_best_where_the_recipe_does_not(values: dict[str, str], best: str) -> None:
    assert EvalConfig.model_validate(values).best == best


def test_a_place_that_is_a_key_gets_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("task: dpo\noptions:\n  safety:\n    helpful_rm: x\nmodel: {path: m}\n")
    recipe = read_recipe(tmp_path / "r.yaml", ["optim.lr=1"])
    for where, found in {
        "model.path": "r.yaml:5 model.path",
        "model.freeze 'vision'": "r.yaml:5 model.freeze 'vision'",
        "optim.lr": "--set optim.lr",
        "options.safety.helpful_rm: model.config": "r.yaml:4 options.safety.helpful_rm: model.config",
        "data.json:1 zero_optimization.stage": "data.json:1 zero_optimization.stage",
        "optim.json": "optim.json",
        "train.jsonl:12": "train.jsonl:12",
    }.items():
        assert recipe.locate_key(where) == found
