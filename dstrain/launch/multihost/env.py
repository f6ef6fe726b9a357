"""Environment variables forwarded to the ranks on other hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrain.errors import Fault, UsageError
from dstrain.launch.command import PORT_FILE_ENV
from dstrain.launch.heartbeat import HEARTBEAT_ENV
from dstrain.launch.worker import LAUNCH_FILE_ENV, SUPERVISOR_ENV

FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "DSTRAIN_", "DS_ACCELERATOR"),
    *("TRITON_", "TOKENIZERS_", "PYTHON", "UCX_", "MLFLOW_"),
)
"""Prefixes of forwarded names. DeepSpeed's runner forwards only PYTHON, MLFLOW, MV2, UCX and NCCL,
on a command line."""
HOST_ONLY_VARIABLES = ("CUDA_VISIBLE_DEVICES", SUPERVISOR_ENV, LAUNCH_FILE_ENV, HEARTBEAT_ENV, PORT_FILE_ENV)
"""Variables that are valid on one host only."""


def build_remote_env(env: Mapping[str, str], entries: Sequence[str], env_files: Sequence[Path]) -> dict[str, str]:
    """Return the environment for the ranks: forwarded names, then DeepSpeed's files, then
    `launch.env`.

    `entries` of launch.env are NAME or NAME=value; `env_files` are paths of `.deepspeed_env`, which
    may not exist. Raises UsageError.
    """
    found = {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in HOST_ONLY_VARIABLES
    }
    for path in env_files:
        # Later sources win: the recipe is the most specific.
        found |= read_env_file(path, env)
    for entry in entries:
        name, given, value = entry.partition("=")
        if not given and name not in env:
            raise UsageError(f"launch.env: {name} is not set here; set it, write {name}=value, or remove it")
        found[name] = value if given else env[name]
    return found


def list_deepspeed_env_files(env: Mapping[str, str]) -> list[Path]:
    """Return the paths at which DeepSpeed looks for variables for all hosts."""
    name = env.get("DS_ENV_FILE", ".deepspeed_env")
    # Not Path.expanduser: it raises if the user has no home folder, as in a container with an
    # arbitrary user id.
    return [path / name for path in (Path(os.path.expanduser("~")), Path())]


def read_env_file(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Read NAME=value lines, with $NAME expanded; comments and blank lines are skipped.

    Empty if there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not valid UTF-8 (byte {error.start}); re-save the file as UTF-8") from None
    found, faults = {}, []
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None:
            faults.append(Fault(f"{path}:{number}", "not NAME=value", "fix the line, or comment it out with #"))
            continue
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[match[1]] = re.sub(r"\$\{?(\w+)\}?", lambda name: env.get(name[1], name[0]), value)
    if faults:
        raise UsageError(faults)
    return found
