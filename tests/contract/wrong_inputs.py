"""Wrong inputs of commands: how each is written, and the words that its message must have."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contract.export_cases import make_run

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
Content = str | bytes | Mapping[str, Any] | Callable[[Path], object]


@dataclass(frozen=True)
class Wrong:
    """A command line, what the message must match, the files that it reads, and its environment."""

    words: list[str]
    message: str
    files: Mapping[str, Content] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def train(*words: str) -> list[str]:
    return ["train", "recipe.yaml", "--run-dir", "run", *words]


def sets(*pairs: str) -> list[str]:
    return train(*(word for pair in pairs for word in ("--set", pair)))


def check(name: str, task: str = "rm") -> list[str]:
    return ["data", "check", name, "--task", task]


def utf16(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, "utf-16")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def run_folder(path: Path) -> None:
    """A run folder of a reward model with a checkpoint at step 1."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(make_run(Path(folder), "rm"), path)


PLAN = ["plan", "recipe.yaml"]
PLAN_MODEL = [*PLAN, "--set", "model.config=null", "--set", "model.path=./m"]
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
SLURM = {
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "a",
}
JSON_OPTION, HOSTFILE = train("--ds-config", "ds.json"), train("--hostfile", "hosts")
TWO_HOSTS: Mapping[str, Content] = {"hosts": "a slots=1\nb slots=2\n"}
IMAGE = '{"image": "a.png", "question": "q", "answer": "a"}'
DOCUMENT = '{"question": "q", "answer": "a", "document": "a.pdf"}'
MANY_DIGITS = "9" * 5000


def model(message: str, **changes: Any) -> Wrong:
    return Wrong(PLAN_MODEL, message, {"m/config.json": LLAMA | changes})


def preset(message: str, content: Content) -> Wrong:
    return Wrong(JSON_OPTION, message, {"ds.json": content})


def stage_2(message: str, **keys: Any) -> Wrong:
    return preset(message, {"zero_optimization": {"stage": 2, **keys}})


def environment(message: str, **env: str) -> Wrong:
    return Wrong(train(), message, env=env)


def data(name: str, content: Content, message: str, task: str = "rm", **more: Content) -> Wrong:
    return Wrong(check(name, task), message, {name: content, **more})


def damaged_run(words: list[str], name: str, content: str | bytes | None, message: str) -> Wrong:
    def write(path: Path) -> None:
        run_folder(path)
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return Wrong(words, message, {"r": write})


EXPORT, SCORE = ["export", "r", "--to", "out"], ["evaluate", "r", "--data", "train.jsonl"]
STATE = "checkpoints/step-00000001"
NO_CHECKPOINT = r"r: has no complete checkpoint; `dstrain checkpoints r` lists the faults"
RECIPES: dict[str, Wrong] = {
    "a data file": Wrong(["train", "train.jsonl"], r"train\.jsonl:2: expected '<document start>'.*; check"),
    "a pipe": Wrong(["train", "b.yaml"], r"b\.yaml: is not a regular file.*; save the recipe as a file", {"b.yaml": os.mkfifo}),
    "a link to itself": Wrong(["train", "b.yaml"], r"b\.yaml: .*; check the path", {"b.yaml": link_to_itself}),
    "a name with NUL": Wrong(["train", "a\0b.yaml"], r"a path holds a NUL character; remove it"),
    "a negative seed": Wrong(sets("seed=-1"), r"--set seed: .*-1.*; raise it"),
    "a seed of 5000 digits": Wrong(sets(f"seed={MANY_DIGITS}"), r"--set seed"),
    "a decay that is no number": Wrong(sets("optim.weight_decay=.nan"), r"--set optim\.weight_decay: .*finite"),
    "a warmup below 0": Wrong(sets("optim.warmup=-1"), r"--set optim\.warmup: .*; raise it"),
    "no steps": Wrong(sets("steps=0"), r"--set steps: .*; raise it"),
    "one step and a half": Wrong(sets("steps=1.5"), r"--set steps: .*1\.5"),
    "no epochs": Wrong(sets("epochs=0"), r"--set epochs: .*; raise it"),
    "epochs that are no number": Wrong(sets("epochs=.nan"), r"--set epochs: .*finite"),
    "epochs without end": Wrong(sets("epochs=1e300"), r"--set epochs: .*; lower it"),
    "a log of no step": Wrong(sets("log.every=0"), r"--set log\.every: .*; raise it"),
    "checkpoints below 0": Wrong(sets("save.keep=-1"), r"--set save\.keep: .*; raise it"),
    "evaluations below 0": Wrong(sets("eval.every=-1"), r"--set eval\.every: .*; raise it"),
    "held out below 0": Wrong(sets("data.eval=null", "data.eval_fraction=-0.1"), r"--set data\.eval_fraction: .*; raise it"),
    "no samples": Wrong(sets("data.max_samples=0"), r"--set data\.max_samples: .*; raise it"),
    "prefetch below 0": Wrong(sets("data.prefetch=-1"), r"--set data\.prefetch: .*; raise it"),
    "adapters of rank 0": Wrong(sets("model.lora.rank=0"), r"--set model\.lora\.rank: .*; raise it"),
    "adapters that are a word": Wrong(sets("model.lora=yes"), r"--set model\.lora: .*a block of keys"),
    "a weight that is no number": Wrong(sets("data.train=[{path: train.jsonl, weight: .nan}]"), r"data\.train.*finite"),
    "an infinite weight": Wrong(sets("data.train=[{path: train.jsonl, weight: .inf}]"), r"data\.train.*finite"),
    "a dtype of 64 bits": Wrong(sets("model.dtype=float64"), r"--set model\.dtype: .*float64"),
    "an attention misspelt": Wrong(sets("model.attn_implementation=fast"), r"--set model\.attn_implementation"),
    "no task": Wrong(sets("task=null"), r"task.*; "),
    "a task of a number": Wrong(sets("task=5"), r"task '5': unknown task; known here: distill"),
    "a config of -1 layers": Wrong(sets("model.config.num_hidden_layers=-1"), r"model\.config\.num_hidden_layers: is -1; correct it: a whole number"),
    "a config of width 0": Wrong(sets("model.config.hidden_size=0"), r"model\.config\.hidden_size: is 0; correct it"),
    "a URL with a password": Wrong(sets("log.wandb.project='http://me:secret@host'"), r"log\.wandb\.project: holds a URL with a password, and recipes are saved; remove"),
}  # fmt: skip
PRESETS: dict[str, Wrong] = {
    "a number": preset(r"ds\.json.*; ", "5"),
    "nothing": preset(r"ds\.json.*; ", "null"),
    "a stage below 0": preset(r"ds\.json:1 zero_optimization\.stage", {"zero_optimization": {"stage": -1}}),
    "a bucket below 0": stage_2(r"zero_optimization\.reduce_bucket_size.*; ", reduce_bucket_size=-1),
    "no bucket": stage_2(r"zero_optimization\.reduce_bucket_size.*; ", reduce_bucket_size=0),
    "a bucket of true": stage_2(r"zero_optimization\.reduce_bucket_size.*; ", reduce_bucket_size=True),
    "UTF-16": preset(r"ds\.json: the file cannot be read .*; name a readable JSON file", utf16("{}")),
    "a pipe": preset(r"ds\.json: is not a regular file.*; save the JSON as a file", os.mkfifo),
    "5000 digits": preset(r"ds\.json.*; ", f'{{"zero_optimization":{{"stage":2,"reduce_bucket_size":{MANY_DIGITS}}}}}'),
    "a device misspelt": stage_2(r"offload_optimizer\.device.*; ", offload_optimizer={"device": "gpuu"}),
    "no micro-batch": preset(r"train_micro_batch_size_per_gpu.*; ", {"train_micro_batch_size_per_gpu": 0}),
    "auto": preset(r"train_micro_batch_size_per_gpu.*auto", {"train_micro_batch_size_per_gpu": "auto"}),
    "adopted list": Wrong(["presets", "--adopt", "ds.json"], r"ds\.json.*; ", {"ds.json": "[]"}),
}  # fmt: skip
HOSTS: dict[str, Wrong] = {
    "bytes": Wrong(HOSTFILE, r"--hostfile hosts: cannot be read \(not valid UTF-8\); write", {"hosts": b"\xff\xfe\0"}),
    "slots of a letter": Wrong(HOSTFILE, r"hosts:1: 'a slots=x' is not a host line; write it like", {"hosts": "a slots=x\n"}),
    "slots below 0": Wrong(HOSTFILE, r"hosts:2: .*; write it like", {"hosts": "a slots=1\nb slots=-1\n"}),
    "slots without end": Wrong(HOSTFILE, r"hosts:1: .*; write it like", {"hosts": "a slots=99999999\n"}),
    "a pipe": Wrong(HOSTFILE, r"--hostfile hosts: is not a regular file.*; save it as a file", {"hosts": os.mkfifo}),
    "included host": Wrong([*HOSTFILE, "--include", "zz"], r"--include 'zz': zz is not in the hostfile", TWO_HOSTS),
    "slot of 5000 digits": Wrong([*HOSTFILE, "--include", f"a:{MANY_DIGITS}"], r"--include 'a:9.*is not a list of slots", TWO_HOSTS),
    "hosts below 0": Wrong([*HOSTFILE, "--num-nodes", "-1"], r"--num-nodes -1: .*; give 1 to 2", TWO_HOSTS),
    "a rank of no host": Wrong([*HOSTFILE, "--no-ssh", "--node-rank", "7"], r"--node-rank 7.*; ", TWO_HOSTS),
    "variables of bytes": Wrong([*HOSTFILE, "--dry-run"], r"e: not valid UTF-8 \(byte 2\); re-save", {**TWO_HOSTS, "e": b"A=\xff\n"}, {"DS_ENV_FILE": "e"}),
    "variables of two words": Wrong([*HOSTFILE, "--dry-run"], r"e:1: not NAME=value; fix the line", {**TWO_HOSTS, "e": "A B\n"}, {"DS_ENV_FILE": "e"}),
}  # fmt: skip
OPTIONS: dict[str, Wrong] = {
    "processes below 0": Wrong(train("--num-gpus", "-1"), r"--num-gpus -1 starts no process; give 1 or more"),
    "processes without end": Wrong(train("--num-gpus", "99999999999999999999"), r"'--num-gpus'.*not in the range x<=100000"),
    "a port below 0": Wrong(train("--num-gpus", "2", "--master-port", "-5"), r"--master-port.*-5"),
    "no allocation": Wrong(train("--launcher", "slurm"), r"(?i)slurm.*; "),
    "a run folder in an object store": Wrong(train("--run-dir", "s3://bucket/run"), r"--run-dir s3:/bucket/run: s3:/… is no folder"),
    "an option misspelt": Wrong(train("--dryrun"), r"No such option '?--dryrun'?.*--dry-run"),
    "a command misspelt": Wrong(["trian"], r"No such command 'trian'\. Did you mean 'train'\?"),
    "a run folder with NUL": Wrong(["train", "recipe.yaml", "--run-dir", "a\0b"], r"a path holds a NUL character; remove it"),
    "a run folder in /proc": Wrong(["train", "recipe.yaml", "--run-dir", "/proc/x"], r"--run-dir /proc/x.*; choose another"),
    "a run folder too long": Wrong(["train", "recipe.yaml", "--run-dir", "x" * 300], r"x.*; choose"),
    "no GPUs": Wrong([*PLAN, "--gpus", "0"], r"'--gpus'.*0 is not in the range"),
    "GPUs without end": Wrong([*PLAN, "--gpus", "9" * 21], r"'--gpus'.*is not in the range 1<=x<=1024"),
    "hosts without end": Wrong([*PLAN, "--nodes", "9" * 11], r"'--nodes'.*is not in the range 1<=x<=100000"),
    "a shape misspelt": Wrong([*PLAN, "--model-shape", "lama-3.1-8b"], r"--model-shape lama-3\.1-8b: .*did you mean 'llama-3\.1-8b'\?"),
}  # fmt: skip
ENVIRONMENT: dict[str, Wrong] = {
    "a port of letters": environment(r"MASTER_PORT is 'abc', which is not a number; unset it", MASTER_PORT="abc"),
    "port 0": environment(r"MASTER_PORT is 0; set it to a port, 1 to 65535, or unset it", MASTER_PORT="0"),
    "port 99999": environment(r"MASTER_PORT is 99999; set it to a port", MASTER_PORT="99999"),
    "no processes": environment(r"rank 0 of 0 .*impossible; start this process through one launcher", **RANK | {"WORLD_SIZE": "0"}),
    "processes of letters": environment(r"WORLD_SIZE is 'abc', which is not a number; ", **RANK | {"WORLD_SIZE": "abc"}),
    "a rank below 0": environment(r"RANK is '-1', which is not a number; ", **RANK | {"RANK": "-1"}),
    "a rank above the last": environment(r"rank 2 of 2 .*impossible; ", **RANK | {"RANK": "2"}),
    "a local rank below 0": environment(r"LOCAL_RANK is '-1', which is not a number; ", **RANK | {"LOCAL_RANK": "-1"}),
    "a local rank above the last": environment(r"local rank 2 of 2, .*impossible; ", **RANK | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}),
    "no local rank": environment(r"LOCAL_RANK is not, .*; set LOCAL_RANK", RANK="0", WORLD_SIZE="2"),
    "a local size of letters": environment(r"LOCAL_WORLD_SIZE is 'x'.*; ", **RANK | {"LOCAL_WORLD_SIZE": "x"}),
    "a rank of mpirun": environment(r"OMPI_COMM_WORLD_LOCAL_RANK is ''.*; ", OMPI_COMM_WORLD_RANK="0"),
    "a job of letters": environment(r"SLURM_JOB_ID is 'x'.*; ", **SLURM | {"SLURM_JOB_ID": "x"}),
    "a step of letters": environment(r"SLURM_STEP_ID is 'x'.*; ", **SLURM | {"SLURM_STEP_ID": "x"}),
    "a node below 0": environment(r"SLURM_NODEID is '-1'.*; ", **SLURM | {"SLURM_NODEID": "-1"}),
    "a list of nodes": environment(r"'a\[x-y\]' names no host; write it like node\[01-03\],login", **SLURM | {"SLURM_STEP_NODELIST": "a[x-y]"}),
    "a list of tasks": environment(r"'2\(y3\)' is not a number of tasks per node; ", **SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(y3)"}),
    "a switch": environment(r"DSTRAIN_DEBUG is 'maybe'; set it to 1 or 0", DSTRAIN_DEBUG="maybe"),
    "memory of a word": Wrong(PLAN, r"DSTRAIN_GPU_MEMORY: 'much' is not a size of memory; write it", env={"DSTRAIN_GPU_MEMORY": "much"}),
    "memory of 24 bytes": Wrong(PLAN, r"DSTRAIN_GPU_MEMORY: '24' means bytes.*; write 24GiB", env={"DSTRAIN_GPU_MEMORY": "24"}),
}  # fmt: skip
DATA: dict[str, Wrong] = {
    "UTF-16": data("x.jsonl", utf16('{"chosen": "a"}\n'), r"x\.jsonl is UTF-16; save it as UTF-8"),
    "cut": data("x.jsonl", '{"chosen":"a","rejec', r"x\.jsonl:1: not valid JSON: .*; fix the line"),
    "NUL": data("x.jsonl", b"\0\0\0", r"x\.jsonl.*; "),
    "200,000 brackets": data("x.jsonl", "[" * 200_000, r"x\.jsonl:1: .*; "),
    "5000 digits": data("x.jsonl", f'{{"chosen": {MANY_DIGITS}}}', r"x\.jsonl:1: .*; "),
    "half a character": data("x.jsonl", '{"prompt":"p","chosen":"\\ud800","rejected":"b"}', r"x\.jsonl:1: .*surrogate.*; "),
    "a cut list": data("x.json", "[{", r"x\.json is not valid JSON: .*; "),
    "numbers": data("x.json", "[1, 2]", r"x\.json.*; "),
    "no parquet": data("x.parquet", b"PAR1junk", r"x\.parquet is not a readable parquet file .*; regenerate it"),
    "empty parquet": data("x.parquet", b"", r"x\.parquet.*; "),
    "no gzip": data("x.jsonl.gz", b"\x1f\x8b\x08junk", r"x\.jsonl\.gz: gzip file is incomplete .*; download it again"),
    "a worksheet": data("x.xlsx", b"PK\3\4", r"x\.xlsx ends in '\.xlsx'; data files end in"),
    "no ending": data("x", "a", r"\bx\b.*; "),
    "a folder": Wrong(check("."), r"is a folder; name a \.jsonl"),
    "not there": Wrong(check("nowhere.jsonl"), r"there is no file .*nowhere\.jsonl.*; check the path"),
    "a pipe": data("p.jsonl", os.mkfifo, r"p\.jsonl is not a regular file.*; name a \.jsonl"),
    "a link to itself": data("l.jsonl", link_to_itself, r"l\.jsonl is a link that points to itself; name"),
    "columns of a number": Wrong([*check("train.jsonl"), "--set", "data.columns=5"], r"--set data\.columns: must be a block of keys"),
    "a series of text": data("x.jsonl", '{"series":"abc","caption":"x"}', r"x\.jsonl:1: .*; ", "temporal"),
    "a series of two lengths": data("x.jsonl", '{"series":[[1,2],[3]],"caption":"x"}', r"x\.jsonl:1: .*; ", "temporal"),
    "no values": data("x.jsonl", '{"series":[],"caption":"x"}', r"x\.jsonl:1: .*; ", "temporal"),
    "a .ts of prose": data("x.ts", "hello", r"x\.ts.*; ", "temporal"),
    "a .ts of bytes": data("x.ts", b"\xff\xfe", r"x\.ts.*; ", "temporal"),
    "an open quote": data("x.csv", 'a,b\n"1,2\n', r"x\.csv:2: unexpected end of data; correct the quotes", "temporal"),
    "rows of two lengths": data("x.csv", "a,b\n1,2,3\n4\n", r"x\.csv:2.*; ", "temporal"),
    "a structure of prose": Wrong(check("p", "protein"), r"a\.pdb.*; ", {"p/a.pdb": "hello"}),
    "a structure of bytes": Wrong(check("p", "protein"), r"a\.cif.*; ", {"p/a.cif": b"\xff\0"}),
    "no structures": Wrong(check("p", "protein"), r"\bp\b.*; ", {"p": Path.mkdir}),
    "an image cut": data("x.jsonl", IMAGE, r"x\.jsonl:1: .*a\.png.*; ", "vlm", **{"a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"}),
    "an image of text": data("x.jsonl", IMAGE, r"x\.jsonl:1: .*a\.png.*; ", "vlm", **{"a.png": b"hello"}),
    "an image that is a folder": data("x.jsonl", IMAGE, r"x\.jsonl:1: .*a\.png.*; ", "vlm", **{"a.png": Path.mkdir}),
    "no image": data("x.jsonl", IMAGE, r"x\.jsonl:1: .*a\.png.*; |image not found: a\.png", "vlm"),
    "an image of a number": data("x.jsonl", IMAGE.replace('"a.png"', "5"), r"x\.jsonl:1: .*; ", "vlm"),
    "an image with NUL": data("x.jsonl", IMAGE.replace("a.png", "a\\u0000b"), r"x\.jsonl:1: .*; ", "vlm"),
    "a document of prose": data("x.jsonl", DOCUMENT, r"x\.jsonl.*a\.pdf.*; ", "docqa", **{"documents/a.pdf": b"hello"}),
    "no document": data("x.jsonl", DOCUMENT, r"x\.jsonl.*a\.pdf.*; ", "docqa"),
}  # fmt: skip
MODELS: dict[str, Wrong] = {
    "layers below 0": model(r"model\.path: num_hidden_layers is -2 in its config; correct it: a whole number", num_hidden_layers=-2),
    "a layer and a half": model(r"num_hidden_layers is 1\.5 in its config; correct it", num_hidden_layers=1.5),
    "layers without end": model(r"num_hidden_layers is 1000000000000 in its config; .*1 to 10000", num_hidden_layers=10**12),
    "a width that is no number": model(r"hidden_size is nan in its config; correct it", hidden_size=float("nan")),
    "heads below 0": model(r"num_attention_heads is -4 in its config; correct it", num_attention_heads=-4),
    "words below 0": model(r"vocab_size is -4 in its config; correct it", vocab_size=-4),
    "a list": Wrong(PLAN_MODEL, r"model.*; ", {"m/config.json": "[1]"}),
    "100,000 brackets": Wrong(PLAN_MODEL, r"model\.path: .*config\.json is not valid JSON .*; correct it", {"m/config.json": "[" * 100_000}),
    "a folder": Wrong(PLAN_MODEL, r"model\.path: .*config\.json cannot be read .*; ", {"m/config.json": Path.mkdir}),
    "UTF-16": Wrong(PLAN_MODEL, r"model\.path: .*config\.json is not valid JSON .*; correct it", {"m/config.json": utf16("{}")}),
}  # fmt: skip
RUNS: dict[str, Wrong] = {
    "no recipe": damaged_run(EXPORT, "recipe.yaml", None, r"r: is neither a run folder .*; give one of them"),
    "a recipe of bytes": damaged_run(EXPORT, "recipe.yaml", b"\xff{", r"r/recipe\.yaml: not valid UTF-8 \(byte 0\); re-save"),
    "an empty recipe": damaged_run(EXPORT, "recipe.yaml", "", r"recipe\.yaml task: is missing; write"),
    "no preset": damaged_run(EXPORT, "ds_config.json", None, r"r/ds_config\.json: does not exist .*; copy the folder again"),
    "a preset of a list": damaged_run(EXPORT, "ds_config.json", "[]", r"r/ds_config\.json: is not a JSON object; copy"),
    "no manifest": damaged_run(EXPORT, f"{STATE}/MANIFEST.json", None, NO_CHECKPOINT),
    "a manifest of a list": damaged_run(EXPORT, f"{STATE}/MANIFEST.json", "[]", NO_CHECKPOINT),
    "an empty shard": damaged_run(EXPORT, f"{STATE}/state/rank-00000-000.safetensors", "", NO_CHECKPOINT),
    "no state": damaged_run(EXPORT, f"{STATE}/state/about.json", None, NO_CHECKPOINT),
    "progress of bytes": damaged_run(EXPORT, f"{STATE}/progress.json", b"\xff", NO_CHECKPOINT),
    "a step of letters": Wrong([*EXPORT, "--step", "x"], r"--step x: must be a step number, best or last", {"r": run_folder}),
    "a step of 5000 digits": Wrong([*EXPORT, "--step", MANY_DIGITS], r"--step 9+: .*; |must be a step number", {"r": run_folder}),
    "a step that is not there": Wrong([*EXPORT, "--step", "99"], r"--step 99: no complete checkpoint of this step; available: 1", {"r": run_folder}),
    "an export onto a file": Wrong(["export", "r", "--to", "train.jsonl"], r"--to train\.jsonl: is a file; choose", {"r": run_folder}),
    "a file for a run": Wrong(["export", "train.jsonl", "--to", "out"], r"train\.jsonl: is neither a run folder .*; give"),
    "nothing for a run": Wrong(["evaluate", "nowhere", "--data", "train.jsonl"], r"Path 'nowhere' does not exist"),
    "no data": Wrong(["evaluate", "r", "--data", "nowhere.jsonl"], r"--data nowhere\.jsonl: there is no such file.*; check", {"r": run_folder}),
    "answers of a scorer": Wrong(["generate", "r", "--prompt", "x"], r"task rm: this model scores and does not generate text; ", {"r": run_folder}),
    "no prompt": Wrong(["generate", "r"], r"no prompt: give --prompt TEXT", {"r": run_folder}),
    "no answer": Wrong(["generate", "r", "--prompt", "x", "--max-new-tokens", "0"], r"0 is not in the range x>=1", {"r": run_folder}),
}  # fmt: skip
GROUPS = {
    "recipe": RECIPES, "preset": PRESETS, "hosts": HOSTS, "option": OPTIONS, "environment": ENVIRONMENT,
    "data": DATA, "model": MODELS, "run": RUNS,
}  # fmt: skip
ALL = {f"{group}: {name}": wrong for group, table in GROUPS.items() for name, wrong in table.items()}
PLAIN = re.compile(r"\s+")
"""Messages are compared with line breaks as blanks: click wraps its own."""
