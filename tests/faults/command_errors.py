"""Errors of the file calls of whole commands: each ends with its exit code and a sentence, and can be repeated.

python -m tests.faults.command_errors [EVERY [COMMAND...]]     the second table of docs/measurements/file-errors.md
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.faults.file_errors import ONCE, arm, build_library, fork_server_with
from tests.faults.fork_server import ForkServer, Hung
from tests.forked import IMPORTED

LIMIT = 90.0
"""Seconds for a command."""
TRAIN = ("train", "recipe.yaml", "--run-dir", "run", "--set", "save.every=1", "--set", "optim.schedule=constant")
COMMANDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "start": ((*TRAIN, "--set", "steps=2", "--resume", "auto"), "fresh"),
    "resume": ((*TRAIN, "--set", "steps=3", "--allow-change", "steps"), "trained"),
    "prepare": (("prepare", "recipe.yaml"), "fresh"),
    "evaluate": (("evaluate", "run", "--data", "eval.jsonl", "--json"), "trained"),
    "export": (("export", "run", "--to", "model"), "trained"),
    "publish": (("export", "run", "--to", "model", "--push-to-hub", "me/rm", "--private", "--dry-run"), "trained"),
}
"""Name -> (arguments, the folder that it begins with)."""
SAMPLES: Mapping[int, Mapping[str, int]] = {
    errno.EIO: {"prepare": 60, "resume": 350, "export": 300, "evaluate": 220, "start": 350, "publish": 400},
    errno.ESTALE: {"prepare": 97, "resume": 173, "export": 173, "evaluate": 173, "start": 173, "publish": 173},
}
"""Error -> command -> n, of every n-th call that fails: a trial takes seconds."""


def run_command(store: str, rank: int, size: int, root: str, arguments: list[str], at: int, number: int) -> int:
    """Run a command in this process, as a rank that a launcher has started where it trains. Returns the exit code."""
    from dstrain.cli import main
    from dstrain.launch.worker import finish_log_copy

    os.chdir(root)
    output = os.open(f"{root}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(DSTRAIN_CACHE=f"{root}/cache", MASTER_ADDR="127.0.0.1", HF_HUB_OFFLINE="1")
    if arguments[0] != "train":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    sys.argv = ["dstrain", *arguments]
    arm(f"{root}/", at, number, ONCE, f"{root}.calls")
    code: Any = 0
    try:
        main(args=arguments, prog_name="dstrain")
    except SystemExit as end:
        code = end.code or 0
    arm("", 0)
    finish_log_copy()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


@dataclass
class Swept:
    """What became of a command with each n-th call failing in turn."""

    calls: int
    outcomes: Counter[int] = field(default_factory=Counter)
    """By exit code."""
    faults: list[str] = field(default_factory=list)


class Commands:
    """Commands in a folder that is put back before each of them."""

    def __init__(self, server: ForkServer, scratch: Path) -> None:
        from tests.tiny import tiny_recipe

        self._server, self._root, self._kept = server, scratch / "w", scratch / "kept"
        self._root.mkdir()
        recipe = tiny_recipe("rm", self._root)
        (self._root / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "eval": {"every": 1}}))
        self._keep("fresh")
        assert self._run([*TRAIN, "--set", "steps=2"]) == 0, self._output()
        self._keep("trained")

    def _keep(self, name: str) -> None:
        shutil.copytree(self._root, self._kept / name, symlinks=True)

    def _run(self, arguments: list[str], at: int = 0, number: int = 0) -> int:
        ended = self._server(
            "tests.faults.command_errors:run_command", 1, LIMIT, root=str(self._root), arguments=arguments, at=at,
            number=number,
        )  # fmt: skip
        return ended[0].code or ended[0].answer

    def _output(self) -> str:
        return Path(f"{self._root}.out").read_text(errors="replace")

    def _put_back(self, name: str) -> None:
        shutil.rmtree(self._root)
        shutil.copytree(self._kept / name, self._root, symlinks=True)

    def sweep(self, name: str, number: int, every: int) -> Swept:
        given, begin = COMMANDS[name]
        arguments = list(given)
        log = Path(f"{self._root}.calls")
        self._put_back(begin)
        log.unlink(missing_ok=True)
        assert self._run(arguments) == 0, self._output()
        calls = [line.split(" ", 1)[1].replace(str(self._root), ".") for line in log.read_text().splitlines()]
        wanted, swept = self._result(name), Swept(len(calls))
        for at in range(1, len(calls) + 1, every):
            self._put_back(begin)
            what = f"{name}, {errno.errorcode[number]} at call {at} ({calls[at - 1]})"
            try:
                code = self._run(arguments, at, number)
                swept.outcomes[code] += 1
                swept.faults += [f"{what}: {fault}" for fault in self._judge(name, arguments, code, wanted)]
            except (Hung, AssertionError) as error:
                swept.faults.append(f"{what}: {str(error)[-400:]}")
        return swept

    def _judge(self, name: str, arguments: list[str], code: int, wanted: Any) -> Iterator[str]:
        """Yield what is wrong after a command with a fault, and after the same command without one."""
        output = self._output()
        last = output.strip().splitlines()[-1:] or ["no output"]
        if code not in (0, 1, 2):
            yield f"exit code {code}: {last[0]}"
        if "Traceback" in output or "bug of dstrain" in output:
            yield f"unexpected: {last[0][:300]}"
        if code and "error: " not in output:
            yield f"exit code {code} without an error line: {last[0]}"
        if code == 0:
            if self._result(name) != wanted:
                yield "another result, and exit code 0"
            return
        if name == "export" and (self._root / "model").exists():
            yield "a folder is left at --to"
            return
        again = self._run(arguments)
        if again or self._result(name) != wanted:
            yield f"then without a fault: exit code {again}, {self._output().strip().splitlines()[-1:]}"

    def _result(self, name: str) -> Any:
        """Return what the command is for."""
        if name in ("start", "resume"):
            rows = map(json.loads, (self._root / "run/metrics.jsonl").read_text().splitlines())
            losses = [(row["step"], row["split"], row["loss"]) for row in rows]
            return losses, sorted(os.listdir(self._root / "run/checkpoints"))
        if name == "evaluate":
            lines = [line for line in self._output().splitlines() if line.startswith("{")]
            return [json.loads(line)["loss"] for line in lines]
        folder = self._root / ("cache" if name == "prepare" else "model")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "digests" not in path.parts]
        names = [path for path in files if path.name not in ("README.md", "MANIFEST.json")]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def main() -> None:
    given = int(sys.argv[1]) if sys.argv[1:] else None
    names = sys.argv[2:] or [*COMMANDS]
    with tempfile.TemporaryDirectory() as scratch:
        library = build_library(Path(scratch))
        with fork_server_with(library, *IMPORTED, "dstrain.cli", "dstrain.commands.train") as server:
            commands, faults, trials = Commands(server, Path(scratch)), list[str](), 0
            print(
                "| command | error | calls | trials | exit 0 | exit 1 | exit 2 | faults |\n|---|---|---|---|---|---|---|---|"
            )
            for number, strides in SAMPLES.items():
                for name in names:
                    swept = commands.sweep(name, number, given or strides[name])
                    total = sum(swept.outcomes.values())
                    codes = (swept.outcomes[code] for code in (0, 1, 2))
                    cells = (name, errno.errorcode[number], swept.calls, total, *codes, len(swept.faults))
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)
                    print(*swept.faults, sep="\n", file=sys.stderr, flush=True)
                    faults += swept.faults
                    trials += total
            print(f"\n{trials} trials, {len(faults)} faults", *faults, sep="\n")


if __name__ == "__main__":
    main()
