"""Task temporal: its stages train what they name, and its faults say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import DataError, DstrainError, RecipeError, TaskError
from dstrain.tasks import make_task
from dstrain.tasks.temporal.task import Temporal
from dstrain.training.build_model import build_model
from tests.tiny import tiny_recipe


def make(folder: Path, options: dict[str, Any] | None = None, **changes: Any) -> Temporal:
    values = tiny_recipe("temporal", folder)
    values["options"] |= options or {}
    values |= changes
    task = make_task(RunConfig.model_validate(values))
    assert isinstance(task, Temporal)
    return task


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("stage", "lora", "parts"),
    [
        ("align", None, {"encoder", "projector"}),
        ("sft", None, {"encoder", "projector", "language_model"}),
        ("classify", None, {"encoder", "classifier"}),
        ("masked", None, {"encoder", "mask_embedding", "reconstruction"}),
    ],
)
def test_a_stage_trains_its_parts(stage: str, lora: Any, parts: set[str], tmp_path: Path) -> None:
    model = build_model(make(tmp_path, {"stage": stage}))
    assert {name.partition(".")[0] for name, one in model.named_parameters() if one.requires_grad} == parts


def test_adapters_leave_the_encoder_alone_and_train_the_projector(tmp_path: Path) -> None:
    values = tiny_recipe("temporal", tmp_path)
    model = {**values["model"], "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}
    names = [name for name, one in build_model(make(tmp_path, model=model)).named_parameters() if one.requires_grad]
    assert any("lora_A" in name for name in names)
    assert any("projector.modules_to_save" in name for name in names)
    assert not any(".encoder." in name for name in names)


def test_the_language_model_alone_is_quantized(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")
    values = tiny_recipe("temporal", tmp_path)
    model = build_model(make(tmp_path, model={**values["model"], "lora": {"rank": 2}, "quantize": "nf4"}))
    names = [name for name, parameter in model.named_parameters() if not parameter.is_floating_point()]
    assert len(names) == 14
    assert all(".language_model." in name for name in names)


def test_encoders_alone_need_no_language_model(tmp_path: Path) -> None:
    task = make(tmp_path, {"stage": "masked"}, model={})
    task.checks.required_keys()
    task.checks.run()
    assert task.tokenizer is None
    assert task.examples("train")


def test_hidden_patches_differ_between_epochs_and_not_between_evaluations(tmp_path: Path) -> None:
    task = make(tmp_path, {"stage": "masked"})
    examples: Any = task.examples("train")
    hidden = [task.collate([examples[3]], positions).tensors["series_masked"] for positions in ([3], [67], None, None)]
    assert torch.equal(hidden[2], hidden[3])
    batches = [task.collate([examples[0]], [64 * epoch]) for epoch in range(8)]
    assert len({tuple(batch.tensors["series_masked"].flatten().tolist()) for batch in batches}) > 1
    assert all(batch.weight == batch.tensors["in_loss"].sum() for batch in batches)


def test_hidden_values_are_not_in_the_input(tmp_path: Path) -> None:
    task = make(tmp_path, {"stage": "masked"})
    batch = make_batch(task.examples("train"), task.collate, [0, 1, 2], 0)  # type: ignore[arg-type]
    hidden = batch.tensors["series_masked"] > 0
    assert not batch.tensors["series"][hidden][:, :4].any()
    assert batch.tensors["targets"][batch.tensors["in_loss"] > 0].any()


def test_each_caption_of_a_record_is_an_example(tmp_path: Path) -> None:
    train = write(
        tmp_path / "own.jsonl",
        {"series": [1, 2, 3], "captions": ["rises", "goes up"]},
        {"series": [3, 2], "caption": "falls"},
    )
    examples: Any = make(tmp_path, data={"train": train, "max_length": 48}).examples("train")
    assert [examples[index]["sample"] for index in range(3)] == [0, 0, 1]
    assert json.loads(bytes(int(byte) for byte in examples[1]["answers"])) == ["rises", "goes up"]


def test_an_image_beside_a_series_is_refused_with_the_way_to_leave_it_out(tmp_path: Path) -> None:
    """The message said that the record has no caption."""
    train = write(tmp_path / "own.jsonl", {"series": [3, 2], "caption": "falls", "image": "plot.png"})
    with pytest.raises(DataError, match=r"own\.jsonl:1: the record has an image.*data\.columns to \{image: null\}"):
        make(tmp_path, data={"train": train, "max_length": 48}).examples("train")


def test_labels_are_those_of_the_training_data(tmp_path: Path) -> None:
    task = make(tmp_path, {"stage": "classify"})
    assert task.known_labels == ("down", "up")
    assert task.build_model().config.id2label == {0: "down", 1: "up"}  # type: ignore[union-attr]
    other = write(tmp_path / "other.jsonl", {"series": [1, 2], "label": "sideways"})
    with pytest.raises(DataError, match=r"other\.jsonl:1: the label 'sideways' is not a training label \(down, up\)"):
        make(tmp_path, {"stage": "classify"}, data={"train": str(tmp_path / "train.jsonl"), "eval": other}).examples(
            "eval"
        )


def test_a_series_that_leaves_no_room_for_text_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "own.jsonl", {"series": [*range(400)], "caption": "rises"})
    fault = r"own\.jsonl:1: the record has 100 soft tokens and \d+ tokens of text, above data\.max_length 48; raise"
    with pytest.raises(DataError, match=fault):
        make(tmp_path, data={"train": train, "max_length": 48}).examples("train")


@pytest.mark.parametrize("stage", ["classify", "masked"])
def test_a_series_whose_attention_would_not_fit_is_refused(stage: str, tmp_path: Path) -> None:
    train = write(tmp_path / "own.jsonl", {"series": [*range(100_000)], "label": "up"})
    fault = (
        r"own\.jsonl:1: the series has 25000 patches, above data\.max_length 1024; raise options\.encoder\.patch_len"
    )
    with pytest.raises(DataError, match=fault):
        make(tmp_path, {"stage": stage}, data={"train": train, "max_length": 1024}).examples("train")
    longer: Any = make(
        tmp_path, {"stage": stage, "encoder": {"patch_length": 200}}, data={"train": train, "max_length": 1024}
    )
    assert len(longer.examples("train")) == 1


@pytest.mark.parametrize(
    ("options", "changes", "fault"),
    [
        ({"mask_ratio": 1.0}, {}, "mask_ratio is 1"),
        ({"stage": "classify", "synthetic": {"num_samples": 4}}, {}, "no labels"),
        ({"stage": "align"}, {"model": {"config": {"model_type": "llama"}, "lora": {}}}, "trains no adapters"),
        ({"encoder": {"hidden_size": 30, "num_heads": 4}}, {}, "multiple of num_heads"),
        ({"encoder": {"patch_length": 0}}, {}, "patch_length is 0"),
        ({"encoder": {"layers": 3}}, {}, r"encoder\.layers: is not an option"),
        ({"synthetic": {"num_samples": 0}}, {}, "num_samples is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=fault):
        make(tmp_path, options, **changes)


def test_metrics_are_those_of_the_stage(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="'accuracy' is not a metric of task temporal"):
        make(tmp_path, eval={"metric": "accuracy"})
    make(tmp_path, {"stage": "classify"}, eval={"metric": "accuracy", "best": "max"})


def test_synthetic_curves_are_training_data(tmp_path: Path) -> None:
    task = make(
        tmp_path, {"synthetic": {"num_samples": 40, "max_length": 30}}, data={"eval_fraction": 0.25, "max_length": 64}
    )
    task.checks.required_keys()
    train, held_out = task.examples("train"), task.examples("eval")
    assert train is not None
    assert held_out is not None
    assert (len(train), len(held_out)) == (30, 10)
    both = make(
        tmp_path,
        {"synthetic": {"num_samples": 40, "max_length": 30}},
        data={"train": str(tmp_path / "train.jsonl"), "max_length": 64},
    )
    mixed: Any = both.examples("train")
    assert mixed.sizes == (64, 40)


def test_a_stage_without_a_language_model_refuses_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="stage masked has no language model"):
        make(tmp_path, {"stage": "masked"}, model={"path": str(tmp_path)}).checks.required_keys()


def test_a_saved_encoder_keeps_its_sizes(tmp_path: Path) -> None:
    task = make(tmp_path, {"stage": "masked"})
    task.build_model().save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    again = make(tmp_path, {"stage": "classify", "encoder": {}}, model={"path": str(tmp_path / "saved")})
    again.checks.required_keys()
    again.checks.run()
    assert again.model_source.patches.length == 4
    other = make(
        tmp_path,
        {"stage": "classify", "encoder": {"patch_length": 5, "num_layers": 7}},
        model={"path": str(tmp_path / "saved")},
    )
    with pytest.raises(
        DstrainError,
        match=r"options\.encoder: differs from the encoder in .*patch_length, num_layers.*options\.encoder=\{\}",
    ):
        other.checks.run()
