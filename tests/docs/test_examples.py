"""Python code in the documentation works: scores with a chat template, and a task on a backbone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from dstrain.commands.data import check_file
from dstrain.config.schema import RunConfig
from dstrain.models.adapters import add_adapters
from dstrain.tasks import find_task, make_task
from tests.tiny import tiny_recipe
from tests.workers import ROOT

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIALOG = [
    {"role": "user", "content": "How do I mend a pump?"},
    {"role": "assistant", "content": "First unplug it."},
]


def block(page: str, holds: str) -> str:
    """Return the Python block of a page that contains these words."""
    text = (ROOT / "docs" / page).read_text()
    [found] = [code for code in re.findall(r"```python\n(.*?)```", text, flags=re.S) if holds in code]
    return str(found)


@pytest.mark.parametrize("form", ["apply_chat_template", "tokenizer.eos_token"])
def test_a_score_by_the_quickstart_is_that_of_training(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny_recipe("rm", tmp_path)
    values["model"]["chat_template"] = CHATML if form == "apply_chat_template" else None
    other = [DIALOG[0], {"role": "assistant", "content": "No."}]
    record = {"prompt": DIALOG[:1], "chosen": DIALOG[1:], "rejected": other[1:]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(record) + "\n")
    values["data"]["max_length"] = 256
    task: Any = make_task(RunConfig.model_validate(values))
    model = task.build_model().eval()
    model.save_pretrained(str(tmp_path / "reward-model"))
    task.export.save_extras(tmp_path / "reward-model")
    with torch.no_grad():
        wanted = float(task.scores(model, task.collate([task.examples("eval")[0]]))[0])
    monkeypatch.chdir(tmp_path)
    names = {
        "model": AutoModelForSequenceClassification.from_pretrained("./reward-model"),
        "tokenizer": AutoTokenizer.from_pretrained("./reward-model"),
    }
    exec(block("quickstart.md", form), names)
    printed = float(re.search(r"\[\[(-?[\d.e-]+)\]\]", capsys.readouterr().out)[1])  # type: ignore[index]
    assert printed == pytest.approx(wanted, abs=1e-4)


def test_the_page_of_series_feeds_an_exported_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny_recipe("temporal", tmp_path)
    values["options"] = {**values["options"], "stage": "classify", "labels": ["down", "up"]}
    values["model"] = {}
    task: Any = make_task(RunConfig.model_validate(values))
    model = task.build_model().eval()
    model.save_pretrained(str(tmp_path / "exported"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("tasks/temporal.md", "stack_patches"), names)
    assert set(names["labels"]) <= {"down", "up"}
    assert str(names["labels"]) in capsys.readouterr().out
    records = [{**record, "label": "up"} for record in names["records"]]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values["data"] = {**values["data"], "train": str(tmp_path / "x.jsonl")}
    again: Any = make_task(RunConfig.model_validate(values))
    batch = again.collate([again.examples("train")[index] for index in range(2)])
    with torch.no_grad():
        logits = model(batch.tensors["series"], batch.tensors["series_positions"])
    torch.testing.assert_close(names["probabilities"], logits.softmax(-1))


def test_windows_of_a_long_series_are_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.jsonl").write_text(json.dumps({"series": [[*range(300)], [*range(300)]]}) + "\n")
    exec(block("tasks/temporal.md", "windows.jsonl"), {})
    report, _ = check_file("windows.jsonl", "temporal", ["options.stage=masked"])
    assert not report.bad
    assert report.columns["windows.jsonl"]["content"] == ["3 series: 2 channels, 128 values"]


def test_the_task_over_a_backbone_learns(tmp_path: Path) -> None:
    tiny: Any = make_task(RunConfig.model_validate(tiny_recipe("rm", tmp_path)))
    AutoModel.from_config(tiny.model_source.config).save_pretrained(str(tmp_path / "base"))
    tiny.tokenizer.save_pretrained(str(tmp_path / "base"))
    lines = [{"text": text, "label": label} for text, label in [("well done", 1), ("go away", 0)] * 4]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "task": str(ROOT / "docs/examples/backbone_task.py"),
        "model": {"path": str(tmp_path / "base")},
        "data": {"train": str(tmp_path / "lines.jsonl"), "max_length": 16},
        "steps": 1,
    }
    task: Any = make_task(RunConfig.model_validate(recipe))
    assert find_task(recipe["task"]).learning_rate == 2e-5  # type: ignore[arg-type]
    assert task.examples("eval") is None
    examples = task.examples("train")
    batch, model = task.collate([examples[index] for index in range(8)]), task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.total.detach()))
    assert losses[-1] < losses[0] / 4
    assert int(loss.metrics["accuracy"]) == 8
    lora = RunConfig.model_validate(
        {**recipe, "model": {"path": "x", "lora": {"targets": ["q_proj", "score"]}}}
    ).model.lora
    assert lora is not None
    adapted = add_adapters(task.build_model(), lora, (), 0)
    assert any("lora_A" in name for name, p in adapted.named_parameters() if p.requires_grad)
