"""Multi-host launches with an `ssh` that stays on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.launch.hostfile import parse_hostfile
from dstrain.launch.plan import Launch, rank_command
from tests.workers import ROOT

SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case $1 in
    unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255 ;;
    denied) echo "[WARNING] a line of the host's" >&2; echo "me@denied: Permission denied (publickey)." >&2
            exit 255 ;;
    mute) exit 255 ;;
    bare) echo "sh: 1: exec: python: not found" >&2; exit 127 ;;
    chatty) echo "welcome to this host"; exec sh -c "$2" ;;
    login*) BASH_ENV=$HOME/bashrc exec bash -c "$2" ;;
    *) exec sh -c "$2" ;;
esac
"""
"""Hosts `login...` read a login script first, as bash does under sshd."""


@pytest.fixture
def login_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hosts `login...` read before they do anything."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "bashrc"
    path.write_text("")
    return path


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(text: str, **options: Any) -> Launch:
        hosts = tuple(parse_hostfile(text, "F"))
        world_size = sum(len(host.slots) for host in hosts)
        return Launch(
            hosts=hosts,
            argv=rank_command(["train"]),
            environment={"HF_TOKEN": "secret", "DS_ACCELERATOR": "cpu"},
            world_size=world_size,
            ranks=range(world_size),
            master_addr="",
            heartbeat_timeout=5.0,
            **options,
        )

    return make
