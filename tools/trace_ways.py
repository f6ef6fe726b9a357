"""Count the files, functions and moves between files that five ways through dstrain take.

python -m tools.trace_ways [-v] [WAY...]

train: `dstrain train demo-rm`, the launching process as far as --dry-run goes, and a rank up to its first optimizer step.
record: one DPO record with an image, from its line to a row of the token store, to a batch, to the loss and its gradient.
save: one checkpoint at ZeRO stage 1, in one process. resume: what a rank runs, up to its first step, only when it resumes.
hosts: two launches with --no-ssh as two hosts, with a rank each, up to the first step.

Counted are calls in the main thread, without those that run at import. A move is a call in another file than the call
before it. -v names the files. Paths before dstrain/ come from the installed or PYTHONPATH's dstrain, so that another
version can be counted.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST_STEP = "DeepSpeedEngine.step"
SAVE = "CheckpointSaver.save"


class Tracer:
    """Records the functions of dstrain that run, from `start` until `stop` is called or a function is entered."""

    def __init__(self, until: str = "", inside: str = "", done: Callable[[], None] = lambda: None) -> None:
        """`until`: qualified name of the function at whose call it ends; `inside`: that of the one it is limited to."""
        self.calls: set[CodeType] = set()
        self.moves, self._last, self._until, self._inside, self._done = 0, "", until, inside, done
        self._outer: FrameType | None = None

    def start(self) -> None:
        sys.setprofile(self._record)

    def stop(self) -> None:
        sys.setprofile(None)
        self._done()

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and frame is self._outer:
            self.stop()
        # Module and class bodies run once, when they are imported; they are not on the way.
        if event != "call" or not code.co_flags & 0x2 or f"{os.sep}dstrain{os.sep}" not in code.co_filename:
            return
        if self._until and code.co_qualname == self._until:
            return self.stop()
        if self._inside and self._outer is None:
            if code.co_qualname != self._inside:
                return None
            self._outer = frame
        self.calls.add(code)
        self.moves += code.co_filename != self._last
        self._last = code.co_filename
        return None

    def dump(self) -> dict[str, Any]:
        """Return {functions: [[file, name], ...], moves}."""
        named = {(code.co_filename.rpartition(f"{os.sep}dstrain{os.sep}")[2], code.co_qualname) for code in self.calls}
        return {"functions": sorted(named), "moves": self.moves}


def trace(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what `work` runs."""
    tracer = Tracer()
    tracer.start()
    try:
        work()
    finally:
        tracer.stop()
    return tracer.dump()


def install(folder: str, until: str, inside: str) -> None:
    """Trace this process, and write what it ran to a file of `folder`, named after its rank."""
    import atexit

    name = f"rank{os.environ['RANK']}" if "RANK" in os.environ else "launcher"
    path = Path(folder) / f"{name}-{os.getpid()}.json"

    def write() -> None:
        sys.setprofile(None)
        path.write_text(json.dumps(tracer.dump()), encoding="utf-8")

    tracer = Tracer(until, inside, write)
    atexit.register(write)
    tracer.start()


def run(arguments: Iterable[str], folder: Path, until: str = "", inside: str = "") -> list[subprocess.Popen[str]]:
    """Start `python -m dstrain ARGUMENTS` with every process of it traced into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    hook = f"import sys\nif '-m' in sys.orig_argv:\n    from tools.trace_ways import install\n    install({str(folder)!r}, {until!r}, {inside!r})\n"
    (folder / "sitecustomize.py").write_text(hook, encoding="utf-8")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    env["DSTRAIN_CACHE"] = str(folder.parent / "cache")
    return [
        subprocess.Popen([sys.executable, "-m", "dstrain", *arguments], env=env, stdout=subprocess.DEVNULL, text=True)
    ]


def traced(arguments: Iterable[str], folder: Path, until: str = "", inside: str = "") -> list[dict[str, Any]]:
    """Return what the processes of a command ran, those of the ranks last."""
    (process,) = run(arguments, folder, until, inside)
    assert process.wait() == 0, f"dstrain {' '.join(arguments)} failed"
    return read_traces(folder)


def read_traces(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank*.json"))]


def train(run_dir: Path, steps: int = 4) -> list[str]:
    """Return the arguments of a run of a few steps in one process."""
    overrides = (f"steps={steps}", "epochs=null", "save.every=2", "eval.every=1000")
    options = [text for override in overrides for text in ("--set", override)]
    return ["train", "demo-rm", *options, "--run-dir", str(run_dir)]


ONE = ["--num-gpus", "1"]


def way_train(folder: Path) -> dict[str, list[dict[str, Any]]]:
    launcher = traced([*train(folder / "run"), *ONE, "--dry-run"], folder / "dry")
    traced([*train(folder / "run"), *ONE], folder / "trace", FIRST_STEP)
    rank = ranks_of(folder / "trace")
    return {"launching process": launcher, "rank": rank, "train": launcher + rank}


def way_record(folder: Path) -> dict[str, list[dict[str, Any]]]:
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task
    from dstrain.train.build_model import build_train_module
    from tests.vision_recipes import named_recipe

    os.environ["DSTRAIN_CACHE"] = f"{folder}/warm"
    _, values = named_recipe("dpo, with images", folder)
    task = make_task(RunConfig.model_validate(values))
    module = build_train_module(task)  # trains the tokenizer, which is not on the way
    os.environ["DSTRAIN_CACHE"] = f"{folder}/cold"
    found: dict[str, Any] = {}
    row = trace(lambda: found.update(examples=task.examples("train")))
    batch = trace(lambda: found.update(batch=task.collate([found["examples"][index] for index in (1, 2)])))
    loss = trace(lambda: module(found["batch"])[0].backward())
    return {"line to row": [row], "row to batch": [batch], "batch to gradient": [loss], "record": [row, batch, loss]}


def way_save(folder: Path) -> dict[str, list[dict[str, Any]]]:
    traced([*train(folder / "run"), *ONE, "--ds-config", "zero1"], folder / "trace", inside=SAVE)
    return {"save": ranks_of(folder / "trace")}


def way_resume(folder: Path) -> dict[str, list[dict[str, Any]]]:
    traced([*train(folder / "run"), *ONE], folder / "first", FIRST_STEP)
    traced([*train(folder / "run", 6), *ONE, "--allow-change", "steps"], folder / "second", FIRST_STEP)
    (first,), (second,) = ranks_of(folder / "first"), ranks_of(folder / "second")
    only = [name for name in second["functions"] if name not in first["functions"]]
    return {"resume": [{"functions": only, "moves": 0}]}


def way_hosts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    hostfile = folder / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in (0, 1):
        command = [*train(folder / "run"), "--hostfile", str(hostfile), "--no-ssh", "--node-rank", str(rank)]
        place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        processes += run([*command, *place], folder / f"host{rank}", FIRST_STEP)
    assert [process.wait() for process in processes] == [0, 0]
    return {"hosts": [*read_traces(folder / "host0"), *read_traces(folder / "host1")]}


WAYS = {"train": way_train, "record": way_record, "save": way_save, "resume": way_resume, "hosts": way_hosts}


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "-v"]
    print("| way | files | functions | moves between files |\n|---|---|---|---|")
    for name in names or WAYS:
        with tempfile.TemporaryDirectory() as folder:
            parts = WAYS[name](Path(folder))
        for part, traces in parts.items():
            functions = {(file, function) for one in traces for file, function in one["functions"]}
            files = {file for file, _ in functions}
            print(f"| {part} | {len(files)} | {len(functions)} | {sum(one['moves'] for one in traces):,} |")
            if "-v" in arguments:
                print("\n".join(f"  {file}" for file in sorted(files)))


if __name__ == "__main__":
    main(sys.argv[1:])
