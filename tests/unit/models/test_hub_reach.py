"""A Hub id that cannot be read ends in an error soon."""

import time
from pathlib import Path

import pytest

from dstrain.errors import RecipeError
from dstrain.models.load import load_pretrained


@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_id_ends_soon_and_names_the_local_folder(
    offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from transformers import AutoConfig

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(RecipeError, match=r"'some-org/none'.*HF_HUB_OFFLINE.*local folder"):
        load_pretrained(AutoConfig, "some-org/none", "model.path", False)
    assert time.monotonic() - start < 15
