"""Hostile and large inputs: mutated structures and PDFs, many files, a large file, users who share folders.

python -m benchmarks.inputs fuzz pdb|mmcif|pdf FOLDER... [--count 3000] [--seed 0]
python -m benchmarks.inputs files --to FOLDER [--count 100000]
python -m benchmarks.inputs jsonl --to FOLDER [--gigabytes 3]
python -m benchmarks.inputs users --to FOLDER    # as root: makes two users of one group
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CPU_SECONDS, MEMORY_BYTES = 10.0, 3 << 30
"""Limits of one file: what takes more is a finding."""
NUMBERS = (b"-1", b"0", b"1e308", b"nan", b"99999999999999999999", b"2147483648", b"-0.0001", b"1.5")
SUFFIXES = {"pdb": (".pdb", ".ent"), "mmcif": (".cif",), "pdf": (".pdf",)}


def mutate(content: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return the content with one to four changes: bits, lines, numbers, pieces of other files, a cut."""
    mutated = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(max(1, len(mutated)))
        length = min(rng.choice((1, 8, 80, 4096)), len(mutated) - start)
        kind = rng.randrange(8)
        if kind == 0:
            for _ in range(rng.randint(1, 32)):
                mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del mutated[start : start + length]
        elif kind == 2:
            mutated[start:start] = mutated[start : start + length] * rng.choice((1, 2, 50))
        elif kind == 3:
            mutated[start : start + length] = rng.randbytes(length)
        elif kind == 4:
            numbers = list(re.finditer(rb"-?\d+(\.\d+)?", mutated[start : start + 4096]))
            if numbers:
                number = rng.choice(numbers)
                mutated[start + number.start() : start + number.end()] = rng.choice(NUMBERS)
        elif kind == 5:
            other = rng.choice(others)
            begin = rng.randrange(max(1, len(other)))
            mutated[start : start + length] = other[begin : begin + rng.choice((1, 80, 4096))]
        elif kind == 6:
            lines = mutated.split(b"\n")
            first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[first], lines[second] = lines[second], lines[first]
            mutated = bytearray(b"\n".join(lines))
        elif rng.random() < 0.2:
            del mutated[start:]
        if not mutated:
            mutated = bytearray(b"\0")
    return bytes(mutated)


def read_structure(path: Path) -> None:
    """Read a structure as the task does."""
    from dstrain.tasks.protein.structures import read_chains

    read_chains(path)


def read_pdf(path: Path) -> None:
    """Read the texts of a PDF and render its first page."""
    from dstrain.tasks.docqa.pages import count_pages, read_texts, render_page

    count_pages(path)
    read_texts(path)
    render_page(path, path.with_suffix(".png"), 1, 72)


READERS: dict[str, Callable[[Path], None]] = {"pdb": read_structure, "mmcif": read_structure, "pdf": read_pdf}


def fuzz(kind: str, folders: Sequence[Path], count: int, seed: int) -> dict[str, Any]:
    """Read `count` mutations of the real files in the folders; return the outcomes, and each finding."""
    from dstrain.errors import DstrainError
    from dstrain.task import BadRecord

    seeds = [
        path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in SUFFIXES[kind] and path.stat().st_size < 2 << 20
    ]
    rng, outcomes, findings = random.Random(seed), Counter[str](), list[str]()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(count):
            path = Path(scratch) / f"{number}{SUFFIXES[kind][0]}"
            path.write_bytes(mutate(rng.choice(seeds), seeds, rng))
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            fault = ""
            try:
                READERS[kind](path)
                outcome = "read"
            except (BadRecord, DstrainError) as error:
                text = str(error)
                limit = re.search(r"seconds of processor time|crashes|of memory", text)
                outcome = f"refused: {limit[0]}" if limit else "refused"
                fault = text if limit or "Error" in text else ""
            except BaseException as error:
                outcome, fault = "finding", f"{type(error).__name__}: {error}"
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            slowest = max(slowest, seconds)
            if seconds > CPU_SECONDS:
                outcome, fault = "finding", f"{seconds:.1f} s of processor time"
            outcomes[outcome] += 1
            if fault:
                findings.append(f"{number}: {fault[:300]}")
            for left in Path(scratch).iterdir():
                left.unlink()
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if memory > MEMORY_BYTES:
        findings.append(f"{memory >> 20} MiB of memory")
    return {
        "kind": kind, "seeds": len(seeds), "mutations": count, **dict(outcomes), "slowest_cpu_seconds": round(slowest, 2),
        "peak_mib": memory >> 20, "findings": findings,
    }  # fmt: skip


def run_measured(words: Sequence[str], **options: Any) -> dict[str, Any]:
    """Run `dstrain WORDS`; return exit code, seconds, processor time, and the largest memory of a process of it."""
    script = "import resource, sys; sys.argv[0] = 'dstrain'; from dstrain.cli import main; main()"
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    row = {
        "command": "dstrain " + " ".join(words), "exit": process.returncode, "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "peak_mib": used.ru_maxrss >> 10, "last_lines": lines[-3:],
    }  # fmt: skip
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


RECIPE = """task: sft
model:
  config: {{model_type: llama, vocab_size: 600, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
            num_attention_heads: 2, num_key_value_heads: 2}}
  tokenizer: {tokenizer}
data: {{train: "{train}", max_length: 256}}
batch: {{total: 4, micro: 2}}
steps: {steps}
log: {{tensorboard: false}}
"""


def write_record(number: int, size: int) -> str:
    """Return a line of a data file with a prompt and an answer of about `size` letters."""
    words = " ".join(f"word{(number * 7919 + place) % 1000}" for place in range(size // 8))
    return json.dumps({"prompt": f"question {number}", "completion": words}) + "\n"


def measure_files(folder: Path, count: int) -> list[dict[str, Any]]:
    """Make `count` files of one record, and read them by a pattern."""
    data = folder / "many"
    data.mkdir(parents=True)
    for number in range(count):
        (data / f"part-{number:06d}.jsonl").write_text(write_record(number, 200))
    recipe = folder / "many.yaml"
    recipe.write_text(RECIPE.format(tokenizer="{train: bpe, vocab_size: 600}", train=f"{data}/*.jsonl", steps=2))
    return [
        run_measured(["data", "check", f"{data}/*.jsonl", "--task", "sft"]),
        run_measured(["train", str(recipe), "--dry-run"]),
        run_measured(["prepare", str(recipe)]),
        run_measured(["prepare", str(recipe)]),
    ]


def measure_jsonl(folder: Path, gigabytes: float) -> list[dict[str, Any]]:
    """Make one large file, and prepare it; a twentieth of its text is tokenized, the rest is in a column of notes."""
    folder.mkdir(parents=True, exist_ok=True)
    large = folder / "large.jsonl"
    notes = json.dumps({"notes": "a note of a reader, " * 190})[1:]
    with large.open("w", encoding="utf-8") as file:
        number = 0
        while file.tell() < gigabytes * 1e9:
            file.write(f"{write_record(number, 200)[:-2]}, {notes}\n")
            number += 1
    recipe = folder / "large.yaml"
    recipe.write_text(RECIPE.format(tokenizer="{train: bpe, vocab_size: 600}", train=large, steps=2))
    return [
        {"command": f"{number} records, {large.stat().st_size} bytes"},
        run_measured(["data", "check", str(large), "--task", "sft"]),
        run_measured(["prepare", str(recipe)]),
        run_measured(["prepare", str(recipe)]),
    ]


def run_as(user: str, umask: int, environment: dict[str, str], words: Sequence[str], cwd: Path) -> dict[str, Any]:
    """Run `dstrain WORDS` as a user; return the exit code and the last line of its output."""
    command = [sys.executable, "-m", "dstrain.cli", *words]
    process = subprocess.run(
        ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--", *command],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment},
        cwd=cwd, umask=umask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=600,
    )  # fmt: skip
    lines = [line for line in process.stdout.splitlines() if line.strip()]
    faults = [line for line in lines if line.startswith("error:")]
    return {"exit": process.returncode, "line": (faults or lines or [""])[-1]}


def make_users(group: str, *names: str) -> None:
    subprocess.run(["groupadd", "-f", group], check=True)
    for name in names:
        if subprocess.run(["id", name], capture_output=True, check=False).returncode:
            subprocess.run(["useradd", "-m", "-U", "-G", group, name], check=True)


def measure_users(folder: Path) -> list[dict[str, Any]]:
    """Two users of a group share cache and runs, under umask 007 and 077; one user has a home that is read-only."""
    make_users("dstrain-team", "dstrain-a", "dstrain-b", "dstrain-c")
    rows = []
    for umask in (0o007, 0o077):
        place = folder / f"{umask:03o}"
        (place / "work").mkdir(parents=True)
        (place / "train.jsonl").write_text("".join(write_record(number, 200) for number in range(40)))
        recipe = place / "r.yaml"
        recipe.write_text(
            RECIPE.format(tokenizer="{train: bpe, vocab_size: 600}", train=place / "train.jsonl", steps=2)
        )
        for path in (place, place / "work"):
            shutil.chown(path, group="dstrain-team")
            path.chmod(0o2770)
        for path in (place / "train.jsonl", recipe):
            shutil.chown(path, group="dstrain-team")
            path.chmod(0o640)
        one, two, environment = place / "work/one", place / "work/two", {"DSTRAIN_CACHE": str(place / "work/cache")}
        for user, words in (
            ("a", ["prepare", str(recipe)]),
            ("a", ["train", str(recipe), "--run-dir", str(one)]),
            ("b", ["prepare", str(recipe)]),
            ("b", ["train", str(recipe), "--run-dir", str(two)]),
            ("b", ["status", str(one)]),
            ("b", ["report", str(one)]),
            ("b", ["checkpoints", str(one), "--verify"]),
            ("b", ["evaluate", str(one), "--data", str(place / "train.jsonl")]),
            ("b", ["train", str(recipe), "--run-dir", str(one), "--set", "steps=3", "--allow-change", "steps"]),
            ("a", ["train", str(recipe), "--run-dir", str(one), "--set", "steps=4", "--allow-change", "steps"]),
        ):
            home = {"HOME": str(Path("~dstrain-" + user).expanduser())}
            found = run_as(f"dstrain-{user}", umask, home | environment, words, place / "work")
            rows.append({"umask": f"{umask:03o}", "user": user, "command": " ".join(words), **found})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    recipe = folder / "007/r.yaml"
    home = folder / "home"
    home.mkdir()
    home.chmod(0o555)
    subprocess.run(["usermod", "-a", "-G", "dstrain-team", "dstrain-c"], check=True)
    cache = {"DSTRAIN_CACHE": str(folder / "c/cache")}
    (folder / "c").mkdir()
    shutil.chown(folder / "c", "dstrain-c")
    for environment, words in (
        ({}, ["prepare", str(recipe)]),
        ({}, ["train", str(recipe), "--run-dir", str(folder / "c/run")]),
        (cache, ["prepare", str(recipe)]),
        (cache, ["train", str(recipe), "--run-dir", str(folder / "c/run")]),
        (cache, ["train", str(recipe)]),
        (cache, ["report", str(folder / "c/run")]),
        (cache, ["export", str(folder / "c/run"), "--to", str(folder / "c/export")]),
        (cache, ["doctor"]),
    ):
        found = run_as("dstrain-c", 0o022, {"HOME": str(home)} | environment, words, home)
        names = "DSTRAIN_CACHE" if environment else ""
        rows.append({"umask": "022", "user": f"c, home read-only {names}".strip(), "command": " ".join(words), **found})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_fuzz = commands.add_parser("fuzz")
    of_fuzz.add_argument("kind", choices=READERS)
    of_fuzz.add_argument("folders", nargs="+", type=Path)
    of_fuzz.add_argument("--count", type=int, default=3000)
    of_fuzz.add_argument("--seed", type=int, default=0)
    of_files, of_jsonl = commands.add_parser("files"), commands.add_parser("jsonl")
    of_users = commands.add_parser("users")
    for one in (of_files, of_jsonl, of_users):
        one.add_argument("--to", type=Path, required=True)
    of_files.add_argument("--count", type=int, default=100_000)
    of_jsonl.add_argument("--gigabytes", type=float, default=3.0)
    asked = parser.parse_args()
    if asked.command == "fuzz":
        rows = [fuzz(asked.kind, asked.folders, asked.count, asked.seed)]
    else:
        os.environ["DSTRAIN_CACHE"] = str(asked.to / "cache")
        if asked.command == "files":
            rows = measure_files(asked.to, asked.count)
        elif asked.command == "jsonl":
            rows = measure_jsonl(asked.to, asked.gigabytes)
        else:
            rows = measure_users(asked.to)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
