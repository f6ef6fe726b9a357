"""Every class of the error tree: raised by real code, with its exit code and a sentence that ends in a fix."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dstrain import errors
from dstrain.batch import Progress, StepResult
from dstrain.cli import main, run_and_exit
from dstrain.commands.selftest import Commands, Processes
from dstrain.config import read_recipe
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import read_column
from dstrain.distributed.store import connect_store
from dstrain.errors import (
    DstrainError,
    RunError,
    UsageError,
    describe_decode_error,
    describe_key_diff,
    describe_unexpected,
    escape_controls,
    explain_system_error,
    first_names,
    format_traceback,
    is_debug,
    mask_secrets,
    save_traceback,
    suggest_name,
)
from dstrain.launch.lease import Lease, check_lease
from dstrain.planner.workload import parse_bytes
from dstrain.preset import read_preset
from dstrain.report.device_errors import explain_device_error
from dstrain.report.run_log import RunLog
from dstrain.tasks import find_task
from dstrain.training.health.trainability import NonFiniteGuard
from dstrain.training.saver import check_disk_space
from tests.unit.training.test_memory import monitor


def wrong_key(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("task: rm\noptim: {lrr: 1}\n")
    read_recipe(folder / "recipe.yaml")


def text_column(folder: Path) -> None:
    read_column("text", [{"sample": 3, "text": "good"}])


def wrong_preset(folder: Path) -> None:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 4}}')
    read_preset(str(folder / "ds.json"))


def second_launch(folder: Path) -> None:
    with Lease(folder) as first, Lease(folder) as second:
        first.acquire()
        second.acquire()


def lost_run_folder(folder: Path) -> None:
    with Lease(folder) as lease:
        lease.acquire()
        shutil.rmtree(folder / ".workers")
        (folder / ".workers").mkdir()
        with Lease(folder) as other:
            other.acquire()
            check_lease(folder, lease.launch_id)


def log_is_a_folder(folder: Path) -> None:
    (folder / "metrics.jsonl").mkdir()
    RunLog(folder).log_metrics({"step": 1})


def three_bad_steps(folder: Path) -> None:
    guard = NonFiniteGuard("stop", False, lambda name, **_: None)
    for step in (1, 2, 3):
        result = StepResult(loss=torch.tensor(0.0), weight=1.0, applied=False, loss_is_finite=False, suspects=(3,))
        guard.check_step(result, Progress(step))


def nobody_answers(folder: Path) -> None:
    connect_store(timedelta(seconds=1))


def no_memory(folder: Path) -> None:
    with monitor(folder).explain():
        np.empty(2**60, dtype=np.uint8)


def failed_check(folder: Path) -> None:
    Commands(folder, Processes(1, True), Processes(1, True)).start(["tasks", "nonsense"])


def full_disk(folder: Path) -> None:
    check_disk_space(2**40, 1, 2**20, folder, False)


def lost_card(folder: Path) -> None:
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    failure = explain_device_error(error, torch.device("cuda", 0), "rank 0, step 3")
    assert failure is not None
    raise failure


EXAMPLES: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "UsageError": (2, lambda folder: parse_bytes("24", "--gpu-memory"), r"--gpu-memory: '24' means bytes, .*; write 24GiB"),
    "RecipeError": (2, wrong_key, r"recipe\.yaml:2 optim\.lrr: no such key; did you mean 'lr'\?"),
    "PresetError": (2, wrong_preset, r"ds\.json:1 zero_optimization\.stage: .*; "),
    "DataError": (2, lambda folder: open_source(folder / "x.jsonl"), r"x\.jsonl.*; check the path"),
    "ColumnError": (2, text_column, r"column 'text' of record 3 is a str; .*; encode text as token ids or bytes"),
    "TaskError": (2, lambda folder: find_task("rmm"), r"task 'rmm'.*; did you mean 'rm'\?"),
    "ResumeError": (2, second_launch, r"process \d+ on .*; .*`kill \d+`"),
    "RunError": (1, log_is_a_folder, r"cannot write .*metrics\.jsonl: Is a directory; it must be a writable file"),
    "NonFiniteError": (1, three_bad_steps, r"step 3: the loss of samples 3 is not finite.*; lower optim\.lr"),
    "PeerFailureError": (1, nobody_answers, r"meeting the other processes: .*; "),
    "RunFolderLockedError": (1, lost_run_folder, r"process \d+ on .*; "),
    "OutOfMemoryError": (1, no_memory, r"(?s)out of memory: rank 0 on .*\n.*1\. batch\.micro"),
    "DeviceError": (1, lost_card, r"rank 0, step 3: the card failed: uncorrectable ECC error .*; .*; "),
    "SelftestError": (1, failed_check, r"`dstrain tasks` ended with exit code 2 instead of 0: error: .*nonsense"),
    "CheckpointError": (1, full_disk, r".*; "),
}  # fmt: skip
"""Class -> exit code, real code that raises it, and the message."""


def subclasses(kind: type[DstrainError]) -> Iterator[type[DstrainError]]:
    for found in kind.__subclasses__():
        if found.__module__ == errors.__name__:
            yield from (found, *subclasses(found))


def test_every_class_of_the_tree_has_an_example() -> None:
    assert {kind.__name__ for kind in subclasses(DstrainError)} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_is_a_sentence_with_its_fix_and_its_exit_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, value)
    code, cause, message = EXAMPLES[name]
    with pytest.raises(DstrainError, match=message) as caught:
        cause(tmp_path)
    assert type(caught.value).__name__ == name
    assert caught.value.exit_code == code


def test_the_picture_of_the_tree_is_the_tree() -> None:
    lines = Path(errors.__file__).read_text(encoding="utf-8").splitlines()
    drawn = [
        re.findall(r"[├└│─ ]*(\w+Error)\b", line)[0]
        for line in lines
        if re.match(r"# ([│├└]|DstrainError|    [├└])", line)
    ]
    assert sorted(drawn) == sorted(["DstrainError", *EXAMPLES])


def test_no_module_has_an_exception_class_of_its_own() -> None:
    root = Path(errors.__file__).parent
    pattern = re.compile(r"^class (\w+)\((?:\w+\.)?\w*(?:Error|Exception)\)", re.MULTILINE)
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
        if path.name != "errors.py"
    }
    # A record, a stop, and a try of a save, that their callers catch.
    caught = {"data/records.py: BadRecord", "training/health/signals.py: StoppedBySignal"}
    assert found <= {*caught, "training/state/manifest.py: TransientError"}


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("off", False), ("1", True), ("True", True)])
def test_debug_is_a_switch(value: str, wanted: bool) -> None:
    assert is_debug({"DSTRAIN_DEBUG": value}) == wanted


def test_a_debug_that_is_no_switch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"DSTRAIN_DEBUG is 'maybe'; set it to 1 or 0"):
        is_debug({"DSTRAIN_DEBUG": "maybe"})


def test_secrets_of_urls_and_variables_are_masked() -> None:
    env = {"WANDB_API_KEY": "0123456789abcdef", "TOKENIZERS_PARALLELISM": "true", "HOME": "/home/someone"}
    text = "GET https://me:pass@host/x with 0123456789abcdef: true, /home/someone"
    assert mask_secrets(text, env) == "GET https://me:...@host/x with ...: true, /home/someone"


def test_an_error_of_another_library_is_one_line_and_its_traceback_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ValueError) as caught:
        raise ValueError("\n\nhf_0123456789 is wrong\nmore")
    error = caught.value
    assert describe_unexpected(ValueError(*error.args)) == "ValueError: ... is wrong"
    path = save_traceback(error)
    assert path is not None
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o077 == 0, "only its owner reads it"
    assert path.read_text() == format_traceback(error)
    assert "hf_0123456789" not in path.read_text()
    assert "raise ValueError" in path.read_text()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert save_traceback(error) is None, "a missing folder does not hide the error"
    assert describe_unexpected(KeyError()) == "KeyError"


def test_a_command_prints_one_line_for_an_unexpected_error_and_all_of_it_with_debug(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("DSTRAIN_DEBUG", "0")  # --debug sets it; monkeypatch takes that back
    monkeypatch.setattr("dstrain.commands.lists.list_tasks", {}.__getitem__)
    result = CliRunner().invoke(main, ["tasks"])
    (file,) = tmp_path.glob("dstrain-traceback-*.log")
    assert (result.exit_code, len(result.output.splitlines())) == (1, 1)
    assert "error: unexpected KeyError: None; this is a bug of dstrain" in result.output
    assert result.output.endswith(f"the full traceback is in {file}\n")
    assert "Traceback (most recent call last)" in file.read_text()
    result = CliRunner().invoke(main, ["--debug", "tasks"])
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.output
    assert result.output.endswith("report it with the traceback above\n")


@pytest.mark.parametrize("words", [["--debug"], []])
def test_a_known_error_is_a_sentence_and_has_its_traceback_with_debug(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_DEBUG", "0")
    result = CliRunner().invoke(main, [*words, "tasks", "rmm"])
    assert result.exit_code == 2
    assert ("Traceback" in result.output) == bool(words)
    assert result.output.splitlines()[-1].startswith("error: ")


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
        (
            PermissionError(errno.EACCES, "denied", "/home/x"),
            UsageError,
            "/home/x: denied; choose another place, or ask",
        ),
        (OSError(errno.EIO, "I/O", "a/b"), RunError, "a/b: I/O; the disk or network file system failed"),
        (OSError(errno.EIO, "I/O"), RunError, "a file cannot be read or written: I/O; the disk or network file"),
        (FileExistsError(errno.EEXIST, "File exists", "a\nb"), RunError, "a\\nb: File exists"),
        (OSError(errno.EXDEV, "Cross-device link", "a", None, "b"), RunError, "a -> b: Cross-device link"),
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), RunError, "may start no more processes or threads"),
        (RuntimeError("can't start new thread"), RunError, "may start no more processes or threads"),
        (RuntimeError("Could not determine home directory."), UsageError, "no home folder is known"),
    ],
)
def test_a_limit_of_the_system_is_explained(error: Exception, kind: type[Exception], words: str) -> None:
    found = explain_system_error(error)
    assert type(found) is kind
    assert words in str(found)


@pytest.mark.parametrize(
    ("cause", "compiler", "words"),
    [
        (
            PermissionError(13, "Permission denied", "/.cache"),
            "sh",
            "cpu_adam (/.cache: Permission denied); set TORCH_EXT",
        ),
        (RuntimeError("Error building extension 'cpu_adam'"), "no-gxx", "there is no compiler no-gxx); install it"),
        (RuntimeError("[1/3] nice c++\nx.cpp:3: error: y\n"), "no-gxx -O3", "(x.cpp:3: error: y); the log of the rank"),
        (
            RuntimeError("Error building\n[1/3] c++ x\nx.cpp:3: fatal error: y.h: No such file\n"),
            "sh",
            "(x.cpp:3: fatal",
        ),
        (RuntimeError("no reason"), "sh", "(no reason); the log of the rank"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_explained_by_its_cause(
    cause: Exception, compiler: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    error = RuntimeError("DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.")
    error.__cause__ = cause
    assert words in str(explain_system_error(error))


def test_another_encoding_is_named() -> None:
    fault = UnicodeDecodeError("utf-8", b"\xff\xfea", 0, 1, "bad")
    assert describe_decode_error(b"\xff\xfea", fault) == "is UTF-16 (byte order mark); save it as UTF-8"
    assert "not valid UTF-8 (byte 0)" in describe_decode_error(b"\xe4", fault)


def test_names_are_suggested_or_listed() -> None:
    assert suggest_name("lrr", ["lr"]) == "did you mean 'lr'?"
    assert suggest_name("x", ["b", "a"]) == "known here: a, b"
    assert suggest_name("x", []) == "remove it"


def test_long_lists_of_names_are_shortened_in_messages() -> None:
    assert first_names([]) == "none"
    assert first_names(["a"]) == "a"
    assert first_names(dict.fromkeys("abcde")) == "a, b, c and 2 more"
    assert first_names(range(5), 4) == "0, 1, 2, 3 and 1 more"
    assert describe_key_diff(["a.weight"], []) == "missing keys: a.weight; unexpected keys: none"


def test_control_characters_of_files_do_not_reach_a_terminal(tmp_path: Path) -> None:
    name = "e\x1b]0;PWN\x07\x9b8m.yaml"
    (tmp_path / name).write_text("task: [")
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    manifest = {"files": {"state/\x1b]0;PWN\x07evil": {"bytes": 1, "sha256": "0"}}, "step": 1}
    (tmp_path / "run/checkpoints/step-00000001/MANIFEST.json").write_text(json.dumps(manifest))
    for arguments in (["train", str(tmp_path / name)], ["checkpoints", str(tmp_path / "run")]):
        result = CliRunner().invoke(main, arguments)
        assert not {*"\x1b\x07\x9b"} & {*result.output}, result.output
    assert escape_controls("a\u202egpj.exe\u2069") == "a\\u202egpj.exe\\u2069"
    assert escape_controls("a\tb\nc\rd\x1be\x9bf\u200dg\xa0") == "a\tb\nc\\rd\\x1be\\x9bf\u200dg\xa0"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_answers_of_a_model_are_escaped_on_a_terminal_alone(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = SimpleNamespace(value="a\x1b]52;c;x\x07b", exit_code=0)
    monkeypatch.setattr("dstrain.commands.run_job.run_job", lambda *_: done)
    monkeypatch.setattr("dstrain.cli.is_terminal", lambda: on_terminal)
    with pytest.raises(SystemExit):
        run_and_exit(cast("Any", None), {}, None, str)
    assert capsys.readouterr().out == ("a\\x1b]52;c;x\\x07b\n" if on_terminal else "a\x1b]52;c;x\x07b\n")
