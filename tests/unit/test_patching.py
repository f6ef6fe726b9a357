"""Versions of patched libraries, and attributes replaced for a while."""

from __future__ import annotations

import importlib.metadata
import types
import warnings

import pytest

from dstrain.patching import check_version, replaced


@pytest.fixture(autouse=True)
def forget() -> None:
    check_version.cache_clear()


@pytest.mark.parametrize("version", ["0.19", "0.19.8", "0.19.8+cpu", "0.19rc1"])
def test_a_tested_version_is_silent(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("deepspeed", "0.19", "0.20")


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "1.0", "unknown"])
def test_another_version_is_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.warns(UserWarning, match=rf"deepspeed {version} .* tested with 0\.19 up to, not including, 0\.20"):
        check_version("deepspeed", "0.19", "0.20")


def test_an_attribute_is_put_back_after_an_error() -> None:
    owner = types.SimpleNamespace(name="old")

    def fail() -> None:
        with replaced(owner, "name", "new"):
            assert owner.name == "new"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert owner.name == "old"
