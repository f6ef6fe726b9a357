"""A model card says what the run was and gives nothing away; an upload sends the whole export, or says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.publish import Publication, list_files, make_card, push_to_hub, write_card
from dstrain.commands.trained_model import LoadedModel
from dstrain.config.schema import RunConfig
from dstrain.errors import RunError, UsageError
from dstrain.tasks import make_task
from tests.run_folders import eval_row
from tests.tiny import tiny_recipe
from tests.unit.commands.hub_server import Hub
from tests.vocabulary import write_jsonl

TOKEN = "hf_0123456789abcdef"


def card(folder: Path, changes: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, task: str = "sft",
         name: str = "it", is_merged: bool = False, info: dict[str, Any] | None = None, **target: Any) -> str:  # fmt: skip
    """Return the card of a run folder whose checkpoint is of step 4."""
    values = tiny_recipe(task, folder)
    for key, value in (changes or {}).items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    config = RunConfig.model_validate(values)
    checkpoint = folder / "run/checkpoints/step-00000004"
    checkpoint.mkdir(parents=True)
    fields = {"step": 4, "samples": 16, "metric": None, "world_size": 2, "zero_stage": 2}
    (checkpoint / "MANIFEST.json").write_text(json.dumps({"files": {}, **fields}))
    recorded = {"recipe": config.model_dump(mode="json"), "steps": 8, "versions": {"dstrain": "0.1.0", "torch": "2.9"}}
    recorded["inputs"] = {
        "data.train": {"digest": "ab12", "samples": 64},
        "data.eval": {"digest": "cd34", "samples": 16},
    }
    (checkpoint / "run.json").write_text(json.dumps({**recorded, **fields, **(info or {})}))
    if rows is None:
        os.mkfifo(folder / "run/metrics.jsonl")
    else:
        write_jsonl(folder / "run/metrics.jsonl", rows)
    model: Any = None
    loaded = LoadedModel(make_task(config), model, 4, checkpoint)
    return make_card(loaded, folder / "run", is_merged, name, Publication(**target))


def metadata(text: str) -> dict[str, Any]:
    """Return the front matter, read as the Hub reads it: between the first two lines of dashes."""
    from huggingface_hub import ModelCard

    found = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    assert ModelCard(text).data.to_dict() == found
    return found


def test_a_card_names_data_metrics_and_recipe(tmp_path: Path) -> None:
    rows = [eval_row(2, loss=9.0), eval_row(4, loss=0.25, token_accuracy=0.75), eval_row(8, loss=8.0)]
    text = card(tmp_path, rows=rows, license="apache-2.0")
    data = metadata(text)
    assert (data["license"], data["pipeline_tag"], data["library_name"]) == (
        "apache-2.0",
        "text-generation",
        "transformers",
    )
    (result,) = data["model-index"][0]["results"]
    assert {one["type"]: one["value"] for one in result["metrics"]} == {"loss": 0.25, "token_accuracy": 0.75}
    assert result["dataset"]["name"] == "eval.jsonl"
    for part in (
        "- data: train.jsonl\n", "- samples in the data: 64\n", "- checkpoint: step 4 of 8\n",
        "hidden_size: 32",
    ):  # fmt: skip
        assert part in text, part
    assert str(tmp_path) not in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, True, "0.5"])
def test_a_metric_that_is_no_finite_number_is_left_out(value: Any, tmp_path: Path) -> None:
    text = card(tmp_path, rows=[eval_row(4, loss=0.5, odd=value)])
    assert [one["type"] for one in metadata(text)["model-index"][0]["results"][0]["metrics"]] == ["loss"]
    assert "odd" not in text


def test_a_run_without_an_evaluation_has_a_card_without_metrics(tmp_path: Path) -> None:
    text = card(tmp_path, {"data": {"eval": None}})
    assert "model-index" not in metadata(text)


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a|b`c*d_e[f](g)", "---\nlicense: mit\n---\n", "模型一号"]
)
def test_names_are_shown_literally(name: str, tmp_path: Path) -> None:
    data = tmp_path / f"{name.replace('/', '')}.jsonl"
    data.write_text("")
    text = card(tmp_path, {"data": {"eval": str(data)}}, [eval_row(4)], name=name, info={"steps": name})
    body = text.split("\n---\n", 1)[1]
    assert "license" not in metadata(text)
    assert metadata(text)["model-index"][0]["name"] == name.replace("\n", "\\n")
    for markup in ("<script>", "[f](g)", "`c*d", "a|b"):
        assert markup not in body.split("```yaml")[0], markup
    if name == "模型一号":
        assert "# 模型一号" in body
        assert "模型一号.jsonl" in body


def test_a_recipe_cannot_leave_its_code_block(tmp_path: Path) -> None:
    text = card(tmp_path, {"model": {"chat_template": "```\n<b>out</b>\n````"}})
    block = text.split("`````yaml\n")[1].split("\n`````")[0]
    assert yaml.safe_load(block)["model"]["chat_template"] == "```\n<b>out</b>\n````"


def test_neither_paths_nor_secrets_are_in_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    changes = {
        "data": {
            "train": "https://user:hunter22@example.com/a/train.jsonl?token=geheim",
            "eval": "~/secret/eval.jsonl",
        },
        "model": {"init": "/home/someone/init.safetensors", "chat_template": f"see /home/someone/t.jinja, {TOKEN}"},
        "launch": {"env": ["LD_PRELOAD=/home/someone/lib.so"]},
        "save": {"copy_to": "s3://bucket/someone"},
    }
    text = card(tmp_path, changes, [eval_row(4)])
    for secret in ("hunter22", "geheim", "someone", "secret", TOKEN, "example.com", str(tmp_path)):
        assert secret not in text, secret
    for name in ("train.jsonl", "eval.jsonl", "init.safetensors", "t.jinja"):
        assert name in text, name


@pytest.mark.parametrize(
    ("front", "found"),
    [
        ("license: mit", {"license": "mit"}),
        ("license: other\nlicense_name: my\nlicense_link: LICENSE", {"license": "other", "license_name": "my", "license_link": "LICENSE"}),
        ("language: en", {}),
        ("license: [mit]", {}),
        ("license: !!python/object:x 1", {}),
        ("a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)) + "license: mit", {"license": "mit"}),
    ],
)  # fmt: skip
def test_the_license_of_a_base_is_read_from_its_card_and_never_guessed(
    front: str, found: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text(f"---\n{front}\n---\n# base\n")
    (tmp_path / "base/config.json").write_text(json.dumps(tiny_recipe("sft", tmp_path)["model"]["config"]))
    text = card(tmp_path, {"model": {"path": str(tmp_path / "base"), "config": None, "tokenizer": "x/y"}})
    data = metadata(text)
    assert {key: data[key] for key in data if key.startswith("license")} == found
    assert "base_model" not in data  # it is no name on the Hub


def test_files_that_are_no_files_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    os.mkfifo(tmp_path / "base/README.md")
    (tmp_path / "base/config.json").write_text(json.dumps(tiny_recipe("sft", tmp_path)["model"]["config"]))
    text = card(tmp_path, {"model": {"path": str(tmp_path / "base"), "config": None, "tokenizer": "x/y"}}, None)
    assert "license" not in metadata(text)


@pytest.mark.parametrize("base_id", ["org/base", "gpt2"])
def test_what_is_on_the_hub_is_linked_and_adapters_name_their_base(base_id: str, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    values = {
        "r": 2,
        "lora_alpha": 4,
        "peft_type": "LORA",
        "base_model_name_or_path": base_id,
        "target_modules": ["q_proj"],
    }
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(values))
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"")
    task = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path)))
    loaded: Any = LoadedModel(task, None, None)  # type: ignore[arg-type]
    base = {"path": str(tmp_path / "adapter"), "config": None, "tokenizer": "x/y"}
    recipe = RunConfig.model_validate({**tiny_recipe("sft", tmp_path), "model": base, "data": {"train": "org/chats"}})
    object.__setattr__(task, "recipe", recipe)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("dstrain.commands.publish._find_auto_class", lambda task: "AutoModelForCausalLM")
    data = metadata(make_card(loaded, tmp_path, False, "it", Publication()))
    monkey.undo()
    assert (data["base_model"], data["datasets"]) == (base_id, ["org/chats"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of two files."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_bytes(b"weights")
    write_card(tmp_path / "out", "---\ntags:\n- x\n---\n# it\n")
    return tmp_path / "out"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub(TOKEN) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        yield made


def test_an_upload_makes_the_repository_hold_the_export(folder: Path, hub: Hub) -> None:
    hub.repos["me/model"] = {
        "model-00001-of-00002.safetensors": b"old",
        "adapter_config.json": b"{}",
        "notes.md": b"mine",
    }
    assert push_to_hub(folder, Publication(repo_id="me/model")) == f"{hub.url}/me/model"
    files = {name: (folder / name).read_bytes() for name in list_files(folder)}
    assert hub.repos["me/model"] == files | {"notes.md": b"mine"}
    assert not hub.private


def test_the_hub_takes_the_card_of_data_with_any_name(tmp_path: Path, folder: Path, hub: Hub) -> None:
    data = tmp_path / "我的 数据 (1).jsonl"
    data.write_text("")
    write_card(folder, card(tmp_path, {"data": {"eval": str(data)}}, [eval_row(4)]))
    push_to_hub(folder, Publication(repo_id="me/model"))
    assert "我的 数据 (1).jsonl" in hub.repos["me/model"]["README.md"].decode()


def test_a_private_repository_is_created_and_a_public_one_is_not_filled(folder: Path, hub: Hub) -> None:
    push_to_hub(folder, Publication(repo_id="me/hidden", private=True))
    assert hub.private == {"me/hidden"}
    hub.repos["me/open"] = {}
    with pytest.raises(RunError, match="it exists and is public, and --private cannot change that"):
        push_to_hub(folder, Publication(repo_id="me/open", private=True))
    assert hub.repos["me/open"] == {}


@pytest.mark.parametrize(
    ("status", "told"), [(401, "the Hub refuses the token"), (403, "the token may not write to me"), (400, "the upload failed")]
)  # fmt: skip
def test_a_refused_upload_says_why_and_keeps_the_export(status: int, told: str, folder: Path, hub: Hub) -> None:
    hub.status = status
    before = list_files(folder)
    with pytest.raises(RunError, match=told) as refused:
        push_to_hub(folder, Publication(repo_id="me/model"))
    assert f"the export in {folder} is complete: `hf upload me/model {folder}` sends it" in str(refused.value)
    assert TOKEN not in str(refused.value)
    assert list_files(folder) == before


def test_a_hub_that_does_not_answer_is_an_error_with_what_to_do(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"--push-to-hub me/model: the upload failed .*is complete"):
        push_to_hub(folder, Publication(repo_id="me/model"))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ({"private": True}, "--private: needs a repository"),
        ({"repo_id": "model"}, "names no owner; write OWNER/NAME"),
        ({"repo_id": "a/b/c"}, "write OWNER/NAME"),
        ({"repo_id": "me/mo del"}, "write OWNER/NAME"),
        ({"repo_id": "me/model"}, "there is no token; set HF_TOKEN"),
        ({"license": "apache 2"}, "--license apache 2: is not an identifier"),
    ],
)
def test_wrong_options_are_refused_without_a_network(
    target: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError, match=told):
        Publication(**target).check()


def test_a_dry_run_needs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Publication(repo_id="me/model", dry_run=True).check()
