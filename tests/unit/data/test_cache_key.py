"""The names that caches are found by: whoever changes one makes every user prepare everything again.

A name is a hash of a key, and the key stands beside what it names. Names of classes, functions and fields of dstrain
are in some keys. Where other examples come of the same data, FORMAT is raised, and the pins here are changed with it.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.vocabulary import invoke
from tests.workers import ROOT

FIXTURE = ROOT / "tests" / "fixtures" / "8f49f80"
VERSIONS = {"tokenizers": "0.23.3", "transformers": "5.23.0", "safetensors": "0.8.0", "pillow": "13.0.0"}
"""How these write a tokenizer, a processor and weights is in the hashes of them."""
AS_PINNED = all(version(name) == pinned for name, pinned in VERSIONS.items())

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
        (folder / f"{name}.png").write_bytes((FIXTURE / "vlm" / f"{name}.png").read_bytes())
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
    (path,) = cache.glob("*/meta.json")
    key = json.loads(path.read_text(encoding="utf-8"))["key"]
    assert path.parent.name == hashed(key)
    return key


PAIRS_KEY = {
    "format": 6, "data": "48efa561d15aed39009e68da46d5b591b73b8e40729e040f4d8d0c23cd95393c", "what": "preferences",
    "max_length": 32, "max_prompt_length": None, "group": "task",
    "token_columns": {"names": ["chosen", "rejected"], "is_pair": True, "prefix": "prompt_length"},
}  # fmt: skip
CHATS_KEY = {
    "format": 6, "data": "d2ac24821988f6bb2db952ca06ee702628c8439c100d1caecee640cda13013d8", "what": "conversations",
    "max_length": 32, "max_prompt_length": None, "assistant_only": True, "group": "task",
    "token_columns": {"names": ["input_ids"], "is_pair": False, "prefix": None},
}  # fmt: skip
LABELLED_KEY = {
    "format": 6, "data": "1020bd43564076bc1cc31df90701a0fefde7eac20f86039e1bac6ecb4debc9ba", "what": "labelled",
    "mismatched": True, "max_length": 32, "max_prompt_length": None, "assistant_only": True, "group": "task",
    "token_columns": {"names": ["answer", "mismatched"], "is_pair": False, "prefix": None},
}  # fmt: skip
SEEN_KEY = CHATS_KEY | {"data": "536bba1e37e8ba3486dbaf909af371314f207249432f4e32b7237a86af19ad26"}

TEXTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str, str]] = {
    "rm": (PAIRS, PAIRS_KEY, "a13a8c11b7d469640048b995322cd74c", "a6be4a1eb269ac6001492a4e6e5b3bbf"),
    "dpo": (PAIRS, PAIRS_KEY, "a13a8c11b7d469640048b995322cd74c", "a6be4a1eb269ac6001492a4e6e5b3bbf"),
    "sft": (CHATS, CHATS_KEY, "18688b0ff5e467a6191dc48ac74285df", "c86df6e9739b8b49118dfc34bc06fad4"),
    "kto": (LABELLED, LABELLED_KEY, "81e2d5b5372b211d00b71273f01e83ed", "802b36614f1767450b43c0d35de9c569"),
}
"""Task -> records, what its key says but for the tokenizer, the store's name, the trained tokenizer's name."""


@pytest.mark.parametrize("task", TEXTS)
def test_a_task_on_text_finds_its_tokens_and_its_tokenizer_again(task: str, tmp_path: Path, cache: Path) -> None:
    records, wanted, store, tokenizer = TEXTS[task]
    prepare(write(tmp_path, task, records))
    key = only_key(cache)
    assert {name: value for name, value in key.items() if name != "tokenizer"} == wanted
    assert [path.name for path in (cache / "tokenizers").iterdir()] == [tokenizer], "whatever the versions are"
    assert hashed(key) == store or not AS_PINNED


def test_a_task_with_images_finds_its_tokens_and_its_copies_again(tmp_path: Path, cache: Path) -> None:
    """The folder that relative paths start from is in the key, and so it differs from test to test."""
    prepare(see(tmp_path))
    key = only_key(cache)
    assert key["folders"] == [str(tmp_path)]
    assert {name: value for name, value in key.items() if name not in ("processor", "folders")} == SEEN_KEY
    assert [path.name for path in (cache / "tokenizers").iterdir()] == ["b81305f16ea47eb371b489a92ce4021d"], (
        "whatever the versions are"
    )
    assert hashed({**key, "folders": ["/data"]}) == "f8a726ae87e254c25c172ab2a06d1dfe" or not AS_PINNED
    copies = [path.name for path in (cache / "images").iterdir()]
    assert copies == ["775a7716960f72c3b9941320858374e1"] or not AS_PINNED


def test_the_colours_of_images_are_found_again(tmp_path: Path, cache: Path) -> None:
    """They are kept by the images' paths, sizes and times."""
    prepare(see(tmp_path, processor={"normalize": "data"}))
    states = [((tmp_path / f"{name}.png"), (tmp_path / f"{name}.png").stat()) for name in ("red", "blue")]
    images = [f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    (found,) = (cache / "colours").iterdir()
    assert found.stem == hashed({"images": images, "most": 10_000, "format": 2})


def test_the_answers_of_a_reference_are_found_again(tmp_path: Path, cache: Path) -> None:
    prepare(write(tmp_path, "dpo", PAIRS, model={"path": str(policy(tmp_path / "policy"))},
                  options={"precompute_ref_log_probs": True}))  # fmt: skip
    tokens = only_key(cache)
    (path,) = (cache / "references").glob("*/key.json")
    key = json.loads(path.read_text(encoding="utf-8"))
    assert path.parent.name == hashed(key)
    assert [file.name for file in path.parent.glob("*.npz")] == ["rows-00000000.npz"]
    assert {name: value for name, value in key.items() if name != "weights"} == {
        "what": "reference", "version": 1, "task": "dpo", "tokens": hashed(tokens), "dtype": "float32",
        "attention": "auto", "drawn_in_shards": False,
    }  # fmt: skip
    assert hashed(key) == "25beb89818691124f9c7e9542e8b65b2" or not AS_PINNED


def policy(folder: Path) -> Path:
    """A model whose weights are all zero, with the tokenizer of a fixture."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    given = FIXTURE / "rm" / "export"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((given / name).read_bytes())
    (folder / "config.json").write_text(json.dumps({**TEXT, "pad_token_id": 0, "eos_token_id": 1}))
    tensors = load_file(given / "model.safetensors")
    del tensors["score.weight"]
    zeros = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(
        zeros | {"lm_head.weight": np.zeros((48, 16), np.float32)}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
