"""The keys that tokens, tokenizers and outputs of frozen models are cached by.

Names of classes, functions and fields of dstrain are in some keys. Where other examples come of the same data,
CACHE_FORMAT is raised.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from dstrain.tasks import find_task
from tests.contract.lora_cases import save_base
from tests.vocabulary import invoke

TEXT: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
EYES = {
    "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 8,
}  # fmt: skip
SEEING = {"model_type": "llava", "vision_feature_select_strategy": "default", "vision_feature_layer": -1}
TOKENIZER = {"train": "bpe", "vocab_size": 46, "alphabet": "data"}
PAIRS = [{"prompt": f"mend {number}?", "chosen": "open it", "rejected": "go away"} for number in range(4)]
CHATS = [{"messages": [{"role": "user", "content": f"mend {number}?"}, {"role": "assistant", "content": "open it"}]}
         for number in range(4)]  # fmt: skip
LABELLED = [{"prompt": f"mend {number}?", "completion": "open it", "label": number < 2} for number in range(4)]
SEEN = [{"messages": [{"role": "user", "content": "<image>which colour?"}, {"role": "assistant", "content": name}],
         "images": [f"{name}.png"]} for name in ("red", "blue")]  # fmt: skip


def write(folder: Path, task: str, records: list[dict[str, Any]], **values: Any) -> str:
    """Writes a recipe and its data; its path."""
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = {
        "task": task,
        "model": {"config": TEXT, "tokenizer": TOKENIZER},
        "data": {"train": "train.jsonl", "max_length": 32},
        "batch": {"total": 2, "micro": 1},
        "steps": 1,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | values))
    return str(folder / "recipe.yaml")


def see(folder: Path, **values: Any) -> str:
    """The same for a model that sees, with the images that the records name."""
    for name in ("red", "blue"):
        Image.new("RGB", (16, 16), name).save(folder / f"{name}.png")
    config = {**SEEING, "text_config": TEXT, "vision_config": EYES}
    return write(folder, "vlm", SEEN, model={"config": config, "tokenizer": TOKENIZER, **values})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, so that all in it was made by the test."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def prepare(recipe: str) -> None:
    result = invoke("prepare", recipe)
    assert result.exit_code == 0, result.output


def hashed(key: Any) -> str:
    """The name of a key, by a way of its own."""
    text = json.dumps(key, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def only_key(cache: Path) -> dict[str, Any]:
    """The key of the one store in a cache; the folder has its name."""
    (path,) = cache.glob("tokens/*/MANIFEST.json")
    key = json.loads(path.read_text(encoding="utf-8"))["key"]
    assert path.parent.name == hashed(key)
    return key


PAIRS_KEY = {
    "format": 7, "data": "48efa561d15aed39009e68da46d5b591b73b8e40729e040f4d8d0c23cd95393c", "what": "preferences",
    "max_length": 32, "max_prompt_length": None, "group": "task",
    "token_columns": {"names": ["chosen", "rejected"], "is_pair": True, "prefix": "prompt_length"},
}  # fmt: skip
CHATS_KEY = {
    "format": 7, "data": "d2ac24821988f6bb2db952ca06ee702628c8439c100d1caecee640cda13013d8", "what": "conversations",
    "max_length": 32, "max_prompt_length": None, "assistant_only": True, "group": "task",
    "token_columns": {"names": ["input_ids"], "is_pair": False, "prefix": None},
}  # fmt: skip
LABELLED_KEY = {
    "format": 7, "data": "1020bd43564076bc1cc31df90701a0fefde7eac20f86039e1bac6ecb4debc9ba", "what": "labelled",
    "mismatched": True, "max_length": 32, "max_prompt_length": None, "assistant_only": True, "group": "task",
    "token_columns": {"names": ["answer", "mismatched"], "is_pair": False, "prefix": None},
}  # fmt: skip
SEEN_KEY = CHATS_KEY | {"data": "536bba1e37e8ba3486dbaf909af371314f207249432f4e32b7237a86af19ad26"}

TEXTS = {
    "rm": (PAIRS, PAIRS_KEY),
    "dpo": (PAIRS, PAIRS_KEY),
    "sft": (CHATS, CHATS_KEY),
    "kto": (LABELLED, LABELLED_KEY),
}
"""Task -> records, and what its key says but for the tokenizer."""


@pytest.mark.parametrize("task", TEXTS)
def test_tokens_are_cached_by_data_and_settings(task: str, tmp_path: Path, cache: Path) -> None:
    records, wanted = TEXTS[task]
    for _ in range(2):
        prepare(write(tmp_path, task, records))
        assert {name: value for name, value in only_key(cache).items() if name != "tokenizer"} == wanted
        assert len([*(cache / "tokenizers").iterdir()]) == 1


def test_tokens_with_images_are_cached_by_processor_and_folder(tmp_path: Path, cache: Path) -> None:
    for _ in range(2):
        prepare(see(tmp_path))
        key = only_key(cache)
        assert key["folders"] == [str(tmp_path)]
        assert {name: value for name, value in key.items() if name not in ("processor", "folders")} == SEEN_KEY
        assert len([*(cache / "tokenizers").iterdir()]) == 1


def test_statistics_of_images_are_cached_by_their_paths_sizes_and_times(tmp_path: Path, cache: Path) -> None:
    prepare(see(tmp_path, processor={"normalize": "data"}))
    states = [((tmp_path / f"{name}.png"), (tmp_path / f"{name}.png").stat()) for name in ("red", "blue")]
    images = [f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    (found,) = (cache / "image_statistics").iterdir()
    assert found.name == hashed({"images": images, "most": 10_000, "format": 2})


def test_outputs_of_a_reference_are_cached_by_tokens_and_weights(tmp_path: Path, cache: Path) -> None:
    save_base(str(tmp_path / "policy"), find_task("dpo").tiny(tmp_path))
    prepare(write(tmp_path, "dpo", PAIRS, model={"path": str(tmp_path / "policy")},
                  options={"precompute_ref_log_probs": True}))  # fmt: skip
    tokens = only_key(cache)
    (path,) = (cache / "references").glob("*/MANIFEST.json")
    key = json.loads(path.read_text(encoding="utf-8"))["key"]
    assert path.parent.name == hashed(key)
    assert sorted(file.name for file in path.parent.glob("*.npy")) == ["ref_chosen_logps.npy", "ref_rejected_logps.npy"]
    assert {name: value for name, value in key.items() if name not in ("weights", "digest")} == {
        "what": "reference", "version": 2, "task": "dpo", "tokens": hashed(tokens), "images": None, "quantize": None, "dtype": "float32",
        "attention": "auto", "drawn_in_shards": False, "first_row": 0, "rows": 4,
    }  # fmt: skip
