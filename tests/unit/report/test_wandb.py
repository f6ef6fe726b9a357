"""Weights & Biases takes the rows, and whatever becomes of it the run goes on."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain.config.schema import WandbConfig
from dstrain.errors import UsageError
from dstrain.report import sinks
from dstrain.report.sinks import WandbSink, check_wandb, get_run_id, resolve_mode
from tests.unit.report.wandb_files import files, only, records, rows, values
from tests.unit.report.wandb_server import Server

KEY = "0123456789abcdef" * 3
OFFLINE = WandbConfig(project="p", mode="offline")
ONLINE = WandbConfig(project="p")
RECIPE = {"task": "rm", "optim": {"lr": 0.1}}


@pytest.fixture(autouse=True)
def nothing_survives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A home without a key; afterwards none of wandb's processes is left."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_DISABLED", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    yield
    assert services() == []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with Server() as made:
        monkeypatch.setenv("WANDB_BASE_URL", made.url)
        yield made


def services() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends in this moment
            found += [child] if child.name().startswith("wandb-") else []
    return found


def row(step: int, loss: float = 0.5, split: str = "train") -> dict[str, object]:
    return {"split": split, "step": step, "samples": 4 * step, "epoch": 0.5, "loss": loss, "word": "x", "none": None}


def taken(path: Path) -> list[tuple[float, float | None, float | None]]:
    return [(row["step"], row.get("train/loss"), row.get("eval/loss")) for row in rows(path)]


@pytest.mark.parametrize(
    ("wanted", "environment", "mode"),
    [
        ("online", {}, "online"),
        ("offline", {}, "offline"),
        ("online", {"WANDB_MODE": "offline"}, "offline"),
        ("online", {"WANDB_MODE": "dryrun"}, "offline"),
        ("offline", {"WANDB_MODE": "online"}, "offline"),
        ("online", {"WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_DISABLED": "true"}, "disabled"),
        ("online", {"WANDB_DISABLED": "false", "WANDB_MODE": "run"}, "online"),
    ],
)
def test_the_environment_lowers_the_mode_and_never_raises_it(
    wanted: str, environment: dict[str, str], mode: str
) -> None:
    assert resolve_mode(wanted, environment) == mode


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        UsageError, match="WANDB_MODE=sometimes: not a valid mode; set it to online, offline or disabled"
    ):
        resolve_mode("online", {"WANDB_MODE": "sometimes"})


def test_a_run_folder_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = get_run_id(tmp_path / "a")
    assert get_run_id(tmp_path / "a") == first != get_run_id(tmp_path / "b")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    assert (get_run_id(tmp_path / "a"), get_run_id(tmp_path / "c")) == (first, "chosen")
    (tmp_path / "b" / "wandb" / "id").write_text("")  # a crash while it was written
    assert get_run_id(tmp_path / "b") == "chosen"


def test_a_missing_wandb_is_refused_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed; run `pip install wandb`, or leave log\.wandb out"):
        check_wandb(OFFLINE)


def test_a_project_with_a_team_is_refused() -> None:
    """wandb.init refused it after the start, and the run went on without a tracker."""
    with pytest.raises(UsageError, match=r"log.wandb.project: has a /, which W&B does not allow; .*WANDB_ENTITY"):
        check_wandb(WandbConfig(project="team/rm", mode="offline"))


def test_online_without_a_key_is_refused_and_offline_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mends = "set WANDB_API_KEY, run `wandb login`, or set log.wandb.mode=offline"
    with pytest.raises(UsageError, match=f"there is no API key; {mends}"):
        check_wandb(ONLINE)
    check_wandb(OFFLINE)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with pytest.raises(UsageError, match=f"its API key cannot be used .*; {mends}") as refused:
        check_wandb(ONLINE)
    assert "secret" not in str(refused.value)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is asked
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine 127.0.0.1:9\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    check_wandb(ONLINE)


@pytest.mark.slow
def test_offline_files_hold_the_rows_the_recipe_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker = WandbSink(OFFLINE, tmp_path / "run", RECIPE)
    assert tracker.event_fields["mode"] == "offline"
    for step in (1, 2):
        tracker.write(row(step, loss=1 / step))
    tracker.write(row(2, loss=0.25, split="eval"))
    tracker.close(75)
    (path,) = files(tmp_path / "run")
    assert str(path).startswith(tracker.event_fields.get("folder", str(tmp_path)))
    assert taken(path) == [(1, 1.0, None), (2, 0.5, None), (2, None, 0.25)]
    assert all("train/word" not in row and "train/none" not in row for row in rows(path))
    run = only(path, "run")
    assert (run.run_id, run.project, run.display_name) == (get_run_id(tmp_path / "run"), "p", "run")
    assert RECIPE.items() <= values(run.config.update).items()
    assert only(path, "exit").exit_code == 75
    only(path, "preempting")
    axes = {record.metric.glob_name: record.metric.step_metric for record in records(path) if record.HasField("metric")}
    assert axes == {"": "", "*": "step"}
    told = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert told == []


def test_a_disabled_tracker_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "true")
    check_wandb(ONLINE)
    tracker = WandbSink(ONLINE, tmp_path / "run", RECIPE)
    tracker.write(row(1))
    tracker.close()
    assert tracker.event_fields == {"mode": "off"}
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_goes_on_under_its_id_and_rows_written_again_are_not_dropped(
    tmp_path: Path, server: Server
) -> None:
    check_wandb(ONLINE)
    for steps, code in (((1, 2, 3), 1), ((2, 3, 4), 0)):  # the second start begins at the checkpoint of step 1
        tracker = WandbSink(ONLINE, tmp_path / "run", RECIPE)
        assert tracker.event_fields["url"].startswith(server.url)
        for step in steps:
            tracker.write(row(step))
        tracker.close(code)
    name = get_run_id(tmp_path / "run")
    assert list(server.runs) == [name]
    assert [server.runs[name][index]["step"] for index in range(6)] == [1, 2, 3, 2, 3, 4]
    assert server.exit_codes[name] == [1, 0]


def test_a_password_in_the_servers_address_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_SILENT", "")
    monkeypatch.setenv("WANDB_BASE_URL", "http://me:pass-word@127.0.0.1:9")
    check_wandb(ONLINE)
    told = capfd.readouterr()
    assert "pass-word" not in told.out + told.err


def test_wandbs_error_is_one_line_without_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no answer\nwhile retrying http://me:pass-word@proxy:1")

    monkeypatch.setattr(sinks, "_init", fail)
    WandbSink(OFFLINE, tmp_path / "run", RECIPE).close()
    assert caplog.messages == [
        "Weights & Biases (offline) did not start: no answer while retrying http://me:...@proxy:1; "
        "this run continues without it"
    ]


@pytest.mark.slow
def test_a_server_that_does_not_answer_leaves_the_rows_in_files(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "INIT_SECONDS", 2.0)
    server.silent = True
    start = time.monotonic()
    tracker = WandbSink(ONLINE, tmp_path / "run", RECIPE)
    assert time.monotonic() - start < 12
    tracker.write(row(1))
    tracker.close()
    assert "did not start" in caplog.text
    assert "its rows go to files" in caplog.text
    assert taken(files(tmp_path / "run")[-1]) == [(1, 0.5, None)]
    assert only(files(tmp_path / "run")[-1], "exit").exit_code == 0


@pytest.mark.slow
def test_a_server_that_goes_away_does_not_hold_up_the_end(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "FINISH_SECONDS", 2.0)
    tracker = WandbSink(ONLINE, tmp_path / "run", RECIPE)
    server.silent = True
    start = time.monotonic()
    tracker.write(row(1))
    tracker.close()
    assert time.monotonic() - start < 12
    assert "may not have the last rows" in caplog.text
    assert f"wandb sync {files(tmp_path / 'run')[0].parent}" in caplog.text
    assert taken(files(tmp_path / "run")[0]) == [(1, 0.5, None)]


def test_the_death_of_its_service_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = WandbSink(OFFLINE, tmp_path / "run", RECIPE)
    for service in services():
        service.kill()
        service.wait()
    for step in range(1, 4):
        tracker.write(row(step))
    tracker.close()
    assert caplog.text.count("takes no more rows") == 1


def stop_services() -> None:
    """Suspend wandb's processes; return when all of them are."""
    until = time.monotonic() + 60
    while not (found := services()) or any(service.status() != psutil.STATUS_STOPPED for service in found):
        assert time.monotonic() < until, [(service.name(), service.status()) for service in found]
        for service in found:
            service.send_signal(signal.SIGSTOP)
        time.sleep(0.02)


def ends_without_service(call: Callable[[], Any]) -> bool:
    """Whether a call ends in 15 s, in a thread, while its service hangs; the service is killed afterwards."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(15)
    ended = not thread.is_alive()
    for service in services():
        service.kill()
    thread.join(10)
    return ended


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds until a service that hangs is killed."""
    monkeypatch.setattr(sinks, "FINISH_SECONDS", 1.0)
    monkeypatch.setattr(sinks, "GRACE_SECONDS", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_service_that_hangs_is_killed_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = WandbSink(OFFLINE, tmp_path / "run", RECIPE)
    stop_services()
    tracker.write(row(1))
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert "does not end, so its processes are killed" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_service_that_hangs_at_the_start_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`wandb.teardown` waits for the process of a start that failed, too."""
    start_run = sinks._init

    def hang(*arguments: Any) -> None:
        start_run(*arguments)
        stop_services()
        raise TimeoutError("no answer")

    monkeypatch.setattr(sinks, "_init", hang)
    assert ends_without_service(lambda: WandbSink(OFFLINE, tmp_path / "run", RECIPE))
    assert "does not end, so its processes are killed" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_service_that_hangs_after_the_last_row_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`finish` may return, or give up, before the service ends: `wandb.teardown` waits for its process."""
    tracker = WandbSink(OFFLINE, tmp_path / "run", RECIPE)
    finish = tracker._run.finish

    def finish_and_stop(**arguments: int) -> None:
        finish(**arguments)
        stop_services()

    monkeypatch.setattr(tracker._run, "finish", finish_and_stop)
    ended: list[str] = []

    def close() -> None:
        try:
            tracker.close()
        except BaseException as error:
            ended.append(repr(error))
        else:
            ended.append("")

    assert ends_without_service(close)
    assert ended == [""], "wandb ends the process that it runs in"
