"""Messages between a launching process and an agent, with other output on the same stream."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dstrain.launch.multihost.channel import Channel

NONCE = "9f3a"
NOISE = {
    "a line": b"welcome\n",
    "no line break": b"hello",
    "a terminal title": b"\x1b]0;host2\x07",
    "JSON": b'{"host_info": {}}\n{"remaining_pids": []}\n',
    "half JSON": b'{"host_info": ',
    "an array": b"[1, 2]\n\n\n",
    "the nonce of another session": b'\nffff {"host_info": {}}\n',
    "a nonce and no JSON": b"\n9f3a {\n9f3a 1\n",
    "bytes": bytes(range(256)) * 8,
    "ten megabytes of one line": b"x" * 10_000_000,
    "a million lines": b"\n" * 1_000_000,
}


class Pair:
    """Our end of a session, and the other's descriptors."""

    def __init__(self) -> None:
        self.read, self.their_write = os.pipe()
        self.their_read, self.write = os.pipe()
        self.line = Channel(self.read, self.write, 1.0, NONCE)

    def comes(self, text: bytes) -> list[dict]:
        """What our end makes of this text, written as the pipe takes it."""
        found = []
        os.set_blocking(self.their_write, False)
        while text:
            try:
                text = text[os.write(self.their_write, text) :]
            except BlockingIOError:
                found += self.line.read_messages()
        return found + self.line.read_messages()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for descriptor in (made.read, made.their_write, made.their_read, made.write):
        os.close(descriptor)


def message(**content: object) -> bytes:
    return f"\n{NONCE} {json.dumps(content)}\n".encode()


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_is_no_message_and_hides_none(noise, pair):
    assert pair.comes(noise) == []
    assert pair.comes(message(host_info={"a": 1}) + noise + message(remaining_pids=[])) == [
        {"host_info": {"a": 1}},
        {"remaining_pids": []},
    ]
    assert pair.line.has_noise == (bool(noise.strip()) and NONCE.encode() not in noise)


def test_noise_does_not_count_as_a_heartbeat(pair, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr("dstrain.launch.multihost.channel.time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(4):
        pair.comes(b"still here\n")
        now += 0.3
    assert pair.line.is_timed_out()
    assert pair.comes(message()) == []
    assert not pair.line.is_timed_out()


def test_a_line_without_end_is_not_kept(pair):
    for _ in range(50):
        pair.comes(b"y" * 100_000)
    assert len(pair.line._read_buffer) < 10


def test_a_long_message_comes_in_parts(pair):
    text = message(environment={"A": "x" * 300_000})
    assert pair.comes(text[:150_000]) == []
    assert pair.comes(text[150_000:]) == [{"environment": {"A": "x" * 300_000}}]


def test_what_is_sent_begins_and_ends_a_line(pair):
    pair.line.send(remaining_pids=[1])
    assert os.read(pair.their_read, 1 << 16) == b'\n9f3a {"remaining_pids": [1]}\n'
