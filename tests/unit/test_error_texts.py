"""Errors of the system are explained, and messages are cut to what a reader needs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dstrain.errors import (
    OutOfMemoryError,
    RunError,
    UsageError,
    describe_decode_error,
    describe_key_diff,
    explain_system_error,
    mask_secrets,
    suggest_name,
)


def test_a_removed_working_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    assert "the working folder was removed" in str(explain_system_error(FileNotFoundError()))


def test_a_missing_file_in_a_folder_that_is_there_is_not_explained() -> None:
    assert explain_system_error(FileNotFoundError("x")) is None


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENAMETOOLONG, "long", "x" * 9), UsageError, "xxxxxxxxx: is too long for the file system"),
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), RunError, "may start no more processes or threads"),
        (RuntimeError("can't start new thread"), RunError, "may start no more processes or threads"),
        (RuntimeError("Could not determine home directory."), UsageError, "no home folder is known"),
    ],
)
def test_a_limit_of_the_system_is_explained(error: Exception, kind: type[Exception], words: str) -> None:
    found = explain_system_error(error)
    assert type(found) is kind
    assert words in str(found)


def test_an_error_out_of_memory_knows_what_the_next_start_does() -> None:
    assert (str(error := OutOfMemoryError("too much", "batch.micro 2")), error.restart) == ("too much", "batch.micro 2")


def test_another_encoding_is_named() -> None:
    fault = UnicodeDecodeError("utf-8", b"\xff\xfea", 0, 1, "bad")
    assert describe_decode_error(b"\xff\xfea", fault) == "is UTF-16 (byte order mark); save it as UTF-8"
    assert "not valid UTF-8 (byte 0)" in describe_decode_error(b"\xe4", fault)


def test_names_are_suggested_or_listed() -> None:
    assert suggest_name("lrr", ["lr"]) == "did you mean 'lr'?"
    assert suggest_name("x", ["b", "a"]) == "known here: a, b"
    assert suggest_name("x", []) == "remove it"


def test_keys_that_differ_are_listed_as_torch_does() -> None:
    assert describe_key_diff(["a"], []) == "missing keys: a; unexpected keys: none"


def test_passwords_are_left_out() -> None:
    assert mask_secrets("see https://me:word@host/x") == "see https://me:...@host/x"
