"""`dstrain train` in a terminal: a line before long silence, a table and a progress line, and a usable terminal after Ctrl-C.

No secret of the environment is in its output, its logs or its run folder.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_recipe
from tests.vocabulary import write_recipe

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


SECRETS = {
    "WANDB_API_KEY": "fedcba9876543210" * 2 + "12345678",
    "HF_TOKEN": "hf_PlantedTokenOfThisTest",
    "AWS_SECRET_ACCESS_KEY": "PlantedAwsSecretAccessKey0123",
    "HTTPS_PROXY": "http://me:PlantedProxyPassword@127.0.0.1:9",
    "https_proxy": "http://me:PlantedProxyPassword@127.0.0.1:9",
    "MY_SERVICE_PASSWORD": "PlantedServicePassword",
}
PLANTED = [value.partition("me:")[2].partition("@")[0] or value for value in SECRETS.values()]


def run_in_terminal(folder: Path, width: int, *words: str, stop_after: str = "") -> tuple[int, str, bool]:
    """Train in a pseudo-terminal, with Ctrl-C after a text; return exit code, output, and if the terminal is as before."""
    train = ["train", "recipe.yaml", "--run-dir", "run", "--num-gpus", "1", *words]
    command = [sys.executable, "-P", "-m", "dstrain", *train]  # -P: as the script `dstrain` does
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(SECRETS, TERM="xterm-256color", CUDA_VISIBLE_DEVICES="")
        os.environ.pop("NO_COLOR", None)
        os.execv(command[0], command)
    before = termios.tcgetattr(terminal)
    text, is_same, until = "", True, time.monotonic() + 500
    while time.monotonic() < until:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        try:
            text += os.read(terminal, 65536).decode(errors="replace")
            is_same = termios.tcgetattr(terminal) == before
        except OSError:  # the last process has closed it
            break
        if stop_after and stop_after in ESCAPE.sub("", text):
            os.write(terminal, b"\x03")
            stop_after = ""
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text, is_same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = tiny_recipe("rm", tmp_path) | {"steps": 6, "launch": {"env": ["MY_SERVICE_PASSWORD"]}}
    values["log"] = {"every": 2, "tensorboard": True, "wandb": {"project": "p", "mode": "offline"}}
    write_recipe(tmp_path, values)
    # A file of the working directory with a package's name: no process imports it.
    (tmp_path / "safetensors.py").write_text("raise ImportError('imported from the working directory')")
    return tmp_path


def find_secrets(folder: Path) -> dict[str, str]:
    """Return file -> the secret that it holds; names of files and targets of links too."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        text = str(path).encode() + (os.readlink(path).encode() if path.is_symlink() else b"") + content
        found |= {str(path): secret for secret in PLANTED if secret.encode() in text}
    return found


@pytest.mark.slow
def test_a_run_in_a_terminal_shows_each_step_and_a_table_and_no_secret(folder: Path) -> None:
    named = ("--set", f"log.wandb.name={SECRETS['HF_TOKEN'][:5]}", "--allow-change", "optim.lr")
    code, text, is_same = run_in_terminal(folder, 100, *named)
    assert (code, is_same) == (0, True), text[-3000:]
    plain = ESCAPE.sub("", text)
    assert plain.index("starting 1 process; loading torch and DeepSpeed takes some seconds") < plain.index("model: ")
    drawn = [int(step) for step in re.findall(r"\b([1-6])/6  ", plain)]
    assert drawn == sorted(drawn)
    assert {2, 4, 6} <= set(drawn), "each row draws the line; between rows a step may be faster than the terminal"
    assert re.search(r"step +loss +accuracy", plain)
    assert re.search(r"\r {3}6 +0\.\d+", plain) or re.search(r"\r *6 +0\.\d+", plain)
    assert re.search(r"memory: measured [\d.]+ MiB", plain)
    assert "predicted" not in plain
    assert "\x1b[?25l" not in text
    assert (folder / "run/environment.json").is_file()
    assert list((folder / "run/wandb").rglob("*.wandb")), "W&B ran, and its files were looked through"
    assert find_secrets(folder / "run") == {}
    assert [secret for secret in PLANTED if secret in text] == []


@pytest.mark.slow  # Ctrl-C: faults/test_kill, contract/test_bench; the terminal: unit/report/test_console
def test_ctrl_c_saves_and_leaves_the_terminal_as_it_was(folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 6", "steps: 100000"))
    # Step 4 has a row, which draws the line; a step without one may be faster than the terminal.
    code, text, is_same = run_in_terminal(folder, 60, stop_after="\r4/100000")
    assert (code, is_same) == (75, True), text[-3000:]
    assert "\x1b[?25l" not in text, "the cursor was never hidden"
    last = text.rstrip().splitlines()[-1]
    assert ESCAPE.sub("", last).strip().startswith("run folder:"), "no progress line is left behind"
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
