"""A chat template that does not end, or makes gigabytes, is a sentence in seconds; one that ends is asked once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain.data import limited_process
from dstrain.data.encoding import rendering
from dstrain.data.encoding.rendering import check_template_terminates, render_conversation
from dstrain.data.encoding.tokenization import train_tokenizer
from dstrain.data.limited_process import SubprocessResult
from dstrain.data.records import BadRecord
from dstrain.errors import RecipeError
from tests.cells import mark_slow
from tests.workers import ROOT

SHORT = replace(rendering.TEMPLATE_LIMITS, wall_seconds=0.5)
ASKED: Any = [{"role": "user", "content": "hi"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": NESTED,
    "a power": "{{ 9 ** (9 ** 9) }}",
    "only with a system prompt": "{% if messages[0].role == 'system' %}" + NESTED + "{% endif %}",
    "only after some turns": "{% if messages | length > 6 %}" + NESTED + "{% endif %}",
    "only with what is asked": "{% if messages[0].content == 'hi' %}" + NESTED + "{% endif %}",
}
LARGE = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a filter": "{{ 'a' | center(10 ** 10) }}",
    "doubling": "{% set s = namespace(x='a') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
}


def tokenizer_with(template: str) -> Any:
    tokenizer = train_tokenizer(["some text"], 270, "bytes")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", mark_slow(ENDLESS, ["loops"]))  # the same loop is in the three under a condition
def test_a_template_that_does_not_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "TEMPLATE_LIMITS", replace(rendering.TEMPLATE_LIMITS, cpu_seconds=1))
    began = time.monotonic()
    with pytest.raises(RecipeError, match=r"model\.chat_template: the chat template of .* does not end: .*; set model"):
        render_conversation(tokenizer_with(ENDLESS[name]), ASKED)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_gigabytes_is_refused(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(
        RecipeError, match=r"the chat template of .* takes more than 2 GiB of memory for a short dialog"
    ):
        render_conversation(tokenizer_with(LARGE[name]), ASKED)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", ""),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ [][1].x.y }}", "no element 1"),
    ],
)
def test_what_a_template_trips_over_is_a_bad_record(template: str, why: str) -> None:
    with pytest.raises(BadRecord, match=f"chat template refuses the dialog .*{why}"):
        render_conversation(tokenizer_with(template), ASKED)


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content }}{% endfor %}<unused>")
    forks, fork = [], os.fork
    monkeypatch.setattr(limited_process.os, "fork", lambda: forks.append(1) or fork())
    assert [render_conversation(tokenizer, ASKED) for _ in range(3)] == ["hi<unused>"] * 3
    check_template_terminates(tokenizer, ASKED)
    assert len(forks) == 1


def test_a_template_of_which_nothing_is_known_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs on a lock of the one that was forked says nothing of the template."""
    monkeypatch.setattr(rendering, "TEMPLATE_LIMITS", SHORT)
    limits, tried = [], [SubprocessResult("lost"), SubprocessResult("done")]
    monkeypatch.setattr(limited_process, "_run_in_child", lambda work, within: limits.append(within) or tried.pop(0))
    check_template_terminates(tokenizer_with("{{ messages }} waits"), ASKED)
    assert [within.wall_seconds for within in limits] == [0.5, 0.5]


def test_a_template_that_could_not_be_tried_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be rendered without limits."""
    monkeypatch.setattr(rendering, "TEMPLATE_LIMITS", SHORT)
    monkeypatch.setattr(rendering, "_render_all", lambda *_: time.sleep(60))
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"could not be tried: the process .* was ended from outside, or did not"):
            check_template_terminates(tokenizer_with("{{ messages }} waits for ever"), ASKED)


def test_a_signal_reaches_who_asked_and_nobody_is_left(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group: the process that tries ends with it."""
    script = """
        from tests.unit.data.encoding.test_rendering import ASKED, NESTED, tokenizer_with
        from dstrain.data.encoding.rendering import check_template_terminates
        tokenizer = tokenizer_with(NESTED)
        print("ready", flush=True)
        check_template_terminates(tokenizer, ASKED)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    os.killpg(child.pid, 2)
    assert child.wait(20) != 0
    deadline = time.monotonic() + 20
    while any(_lives_in(process, child.pid) for process in psutil.process_iter()):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def _lives_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
