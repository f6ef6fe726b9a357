"""A Hub id that cannot be read ends in an error after one request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from dstrain.errors import RecipeError
from dstrain.models.load import load_pretrained


@pytest.fixture
def requests() -> Iterator[tuple[int, list[int]]]:
    """(port, requests so far) of a server that closes every connection without an answer."""
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    seen.append(len(connection.recv(4096)))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], seen
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_id_is_asked_for_once_and_the_error_names_the_local_folder(
    offline: bool, requests: tuple[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    port, seen = requests
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(RecipeError, match=r"'some-org/none'.*HF_HUB_OFFLINE.*local folder"):
        load_pretrained(AutoConfig, "some-org/none", "model.path", False)
    assert len(seen) == (0 if offline else 1)
