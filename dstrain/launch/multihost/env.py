"""Which variables of the launching process reach the ranks on other hosts."""

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
"""Beginnings of names. DeepSpeed's runner passes on PYTHON, MLFLOW, MV2, UCX and NCCL alone, on a command line."""
HOST_ONLY_VARIABLES = ("CUDA_VISIBLE_DEVICES", SUPERVISOR_ENV, LAUNCH_FILE_ENV, HEARTBEAT_ENV, PORT_FILE_ENV)
"""Mean something on one host only."""


def build_remote_env(env: Mapping[str, str], entries: Sequence[str], env_files: Sequence[Path]) -> dict[str, str]:
    """The environment for the ranks: what travels by name, DeepSpeed's files, then `launch.env`.

    `wanted`: names, or NAME=value. `files`: those of DeepSpeed's `.deepspeed_env` that exist count. Raises UsageError.
    """
    found = {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in HOST_ONLY_VARIABLES
    }
    for path in env_files:
        found |= read_env_file(path, env)
    for entry in entries:
        name, given, value = entry.partition("=")
        if not given and name not in env:
            raise UsageError(f"launch.env: {name} is not set here; set it, write {name}=value, or take it out")
        found[name] = value if given else env[name]
    return found


def list_deepspeed_env_files(env: Mapping[str, str]) -> list[Path]:
    """Where DeepSpeed looks for variables that all hosts get."""
    name = env.get("DS_ENV_FILE", ".deepspeed_env")
    # os.path's, since Path's raises where the user has no home folder, as in a container with an arbitrary user ID.
    return [path / name for path in (Path(os.path.expanduser("~")), Path())]


def read_env_file(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """NAME=value lines; comments and blank lines are fine, $NAME is expanded. Empty where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found, faults = {}, []
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None:
            faults.append(
                Fault(f"{path}:{number}", "it is not NAME=value", "fix the line, or make it a comment with #")
            )
            continue
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[match[1]] = re.sub(r"\$\{?(\w+)\}?", lambda name: env.get(name[1], name[0]), value)
    if faults:
        raise UsageError(faults)
    return found
