"""An export holds what the checkpoint holds and says what the run said, or there is none."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from dstrain.cli import main
from dstrain.commands import export
from dstrain.commands.export import export_model
from dstrain.errors import CheckpointError, UsageError
from dstrain.tasks.sft import SFT
from tests.cells import SLOW, mark_slow
from tests.contract.export_cases import Change, make_run, read_as_a_stranger, spoil, stored
from tests.contract.lora_cases import save_base
from tests.forked import fork
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, write_recipe
from tests.workers import ROOT, Workers

CASES = "tests.contract.export_cases:"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    values = tiny_recipe("rm", tmp_path) | {
        "eval": {"every": 2, "metric": "accuracy", "best": "max"},
        "save": {"every": 2},
    }
    write_recipe(tmp_path, values)
    return str(tmp_path / "recipe.yaml")


TIED = {"model": {"config": {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
                             "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}}}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "changes", "precision"),
    [
        SLOW("rm", {}, "fp32", id="rm-fp32"),  # fp32 by the two below
        pytest.param("rm", {}, "bf16", id="rm-bf16"),
        pytest.param("sft", {}, "fp32", id="sft-fp32"),
        SLOW("sft", {}, "bf16", id="sft-bf16"),  # bf16 by rm and dpo
        pytest.param("dpo", TIED, "fp32", id="dpo, tied-fp32"),
        pytest.param("dpo", TIED, "bf16", id="dpo, tied-bf16"),
    ],
)
def test_a_stranger_reads_the_checkpoint(task: str, changes: dict[str, Any], precision: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "it", task, changes, precision)
    proof = export_model(run, "last", tmp_path / "out")
    model, told = read_as_a_stranger(tmp_path / "out", "rm" in task)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert proof.max_diff == 0
    kept, found = stored(str(run / "checkpoints/step-00000001")), model.state_dict()
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert set(found) - set(kept) == ({"lm_head.weight"} if changes else set())
    for name, value in kept.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], value.to(dtype), rtol=0, atol=0)
    in_file = load_file(tmp_path / "out/model.safetensors")
    assert in_file.keys() == kept.keys()
    if changes:
        assert model.lm_head.weight is model.model.embed_tokens.weight


SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


@pytest.mark.parametrize("family", mark_slow(FAMILIES, ["qwen3", "gpt2"]))  # mixtral has stacked weights too
@pytest.mark.parametrize("changed", [False, True], ids=["as it is", "one value changed"])
def test_an_export_of_other_families_is_checked(
    family: str, changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's experts are one tensor in memory and one each in files, gpt2's matrices lie across."""
    run = make_run(tmp_path / "it", "sft", {"model": {"config": {"model_type": family, **FAMILIES[family]}}}, "bf16")
    if changed:
        spoil(monkeypatch, lambda held: held[max(held)].view(-1)[-1:].neg_())
        with pytest.raises(CheckpointError, match=r"the values of .* in the exported files differ"):
            export_model(run, "last", tmp_path / "out")
        assert left_in(tmp_path) == {"it"}
        return
    export_model(run, "last", tmp_path / "out")
    model, told = read_as_a_stranger(tmp_path / "out", False)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    for name, value in stored(str(run / "checkpoints/step-00000001")).items():
        assert torch.equal(model.state_dict()[name], value.bfloat16()), name


@pytest.mark.parametrize("task", [SLOW("sft"), "rm"])
def test_no_weights_of_the_base_are_read(task: str, tmp_path: Path) -> None:
    save_base(str(tmp_path / "base"), tiny_recipe("sft", tmp_path))
    (tmp_path / "base/generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    model = {"path": str(tmp_path / "base"), "config": None}
    run = make_run(tmp_path / "it", task, {"model": model}, "bf16")
    (tmp_path / "base/model.safetensors").unlink()
    assert export_model(run, "last", tmp_path / "out").max_diff == 0
    if task == "sft":
        assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.6
    told = json.loads((tmp_path / "out/config.json").read_text())
    assert (told["dtype"], told["use_cache"]) == ("bfloat16", True)


def test_what_a_base_took_apart_is_read_as_it_is(tmp_path: Path) -> None:
    """transformers takes a tie apart where a folder holds two different tensors for it."""
    from transformers import AutoModelForCausalLM

    values = tiny_recipe("sft", tmp_path)
    save_base(str(tmp_path / "base"), values)
    settings = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    run = make_run(tmp_path / "it", "sft", {"model": {"path": str(tmp_path / "base"), "config": None}})
    kept = stored(str(run / "checkpoints/step-00000001"))
    assert not torch.equal(kept["lm_head.weight"], kept["model.embed_tokens.weight"])
    assert export_model(run, "last", tmp_path / "out").max_diff == 0
    again = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).state_dict()
    assert all(torch.equal(again[name], value) for name, value in kept.items())


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_run_in_fp16_is_exported_in_fp16(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    save_base(str(tmp_path / "base"), tiny_recipe("sft", tmp_path))
    model = {"path": str(tmp_path / "base"), "config": None, "lora": lora}
    run = make_run(tmp_path / "it", "sft", {"model": model})
    (run / "ds_config.json").write_text(json.dumps({"fp16": {"enabled": True}}))
    assert export_model(run, "last", tmp_path / "out", merge_lora=lora is not None).dtype == "float16"
    kinds = {value.dtype for value in load_file(tmp_path / "out/model.safetensors").values()}
    assert kinds == {torch.float16}
    assert export_model(run, "last", tmp_path / "wide", ["model.dtype=float32"], lora is not None).dtype == "float32"


def test_a_model_in_several_files_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "it", "sft")
    export_model(run, "last", tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    model, told = read_as_a_stranger(tmp_path / "out", False)
    assert not told["missing_keys"]
    for name, value in stored(str(run / "checkpoints/step-00000001")).items():
        assert torch.equal(model.state_dict()[name], value), name


NAME = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
SABOTAGE: dict[str, tuple[Change, str]] = {
    "emptied": (lambda held: held.update({NAME: torch.empty(0)}), rf"{NAME} is \(0,\) of F32 in the exported files, and \(48, 32\)"),
    "dropped": (lambda held: held.pop(NAME), f"missing keys: {NAME}; unexpected keys: none"),
    "a norm dropped": (lambda held: held.pop(NORM), f"missing keys: {NORM}; unexpected keys: none"),
    "renamed": (lambda held: held.update({"odd.weight": held.pop(NAME)}), f"missing keys: {NAME}; unexpected keys: odd.weight"),
    "added": (lambda held: held.update({"odd.weight": torch.ones(2)}), "missing keys: none; unexpected keys: odd.weight"),
    "one value": (lambda held: held[NAME][3, 4].add_(1e-4), f"the values of {NAME} in the exported files differ"),
    "one sign": (lambda held: held[NAME].view(-1)[5:6].neg_(), f"the values of {NAME} in the exported files differ"),
    "cast": (lambda held: held.update({NAME: held[NAME].bfloat16()}), rf"{NAME} is \(48, 32\) of BF16 in the exported files, and .* of F32"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a policy in fp32; step 1 is its only checkpoint."""
    return make_run(tmp_path_factory.mktemp("it"), "sft")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_umask_says_who_may_read_an_export(umask: int, mode: int, run: Path, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        export_model(run, "last", tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(modes, mode)
    assert "model.safetensors" in modes


@pytest.mark.parametrize("task", [SLOW("sft"), "vlm"])  # vlm saves a processor with its tokenizer
def test_a_saved_tokenizer_does_not_say_where_it_was_loaded_from(task: str, tmp_path: Path) -> None:
    export_model(make_run(tmp_path / "first", task), "last", tmp_path / "exported")
    base = {"path": str(tmp_path / "exported"), "config": None}
    trained = make_run(tmp_path / "second", task, {"model": base})
    export_model(trained, "last", tmp_path / "again")
    for folder in (tmp_path / "exported", trained / "tokenizer", tmp_path / "again"):
        text = (folder / "tokenizer_config.json").read_text()
        assert not {"is_local", "local_files_only", "name_or_path"} & json.loads(text).keys()
        assert str(tmp_path) not in text


def test_an_exported_folder_without_a_step_is_exported_again(run: Path, tmp_path: Path) -> None:
    export_model(run, "last", tmp_path / "first")
    said = CliRunner().invoke(main, ["export", str(tmp_path / "first"), "--to", str(tmp_path / "second")])
    assert said.exit_code == 0, said.output
    assert said.output.startswith(f"{tmp_path / 'second'}: float32; reloaded")


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_not_the_model_is_refused_by_name(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = SABOTAGE[name]
    spoil(monkeypatch, change)
    with pytest.raises(CheckpointError, match=words):
        export_model(run, "last", tmp_path / "out")
    assert not left_in(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held.pop(NAME), f"the values of {NAME} in the reloaded model differ"),
        (lambda held: held[NAME][3, 4].add_(1e-4), f"the values of {NAME} in the reloaded model differ"),
        (lambda held: held.update({NAME: torch.empty(0)}), r"the exported folder cannot be loaded"),
    ],
    ids=["dropped", "one value", "emptied"],
)
def test_what_was_loaded_is_compared_too(
    change: Change, words: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the files were not looked at: transformers draws what is missing at random, with a warning."""
    spoil(monkeypatch, change)
    monkeypatch.setattr(export, "check_exported_files", lambda *args: None)
    with pytest.raises(CheckpointError, match=words):
        export_model(run, "last", tmp_path / "out")
    assert not left_in(tmp_path)


def test_a_model_that_is_not_the_checkpoint_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dstrain.training.state import engine_state as restore

    fill = restore._load_unsharded

    def fill_but_one(tensors: Any, state: Any) -> None:
        fill(tensors, state)
        with torch.no_grad():
            tensors[NAME][3, 4] += 1e-4

    monkeypatch.setattr(restore, "_load_unsharded", fill_but_one)
    with pytest.raises(CheckpointError, match=f"the values of {NAME} in the model differ"):
        export_model(run, "last", tmp_path / "out")
    assert not left_in(tmp_path)


def test_answers_that_are_no_numbers_are_no_proof(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SFT, "export_outputs", lambda self, model, batch: torch.full((3,), torch.nan))
    with pytest.raises(CheckpointError, match="its outputs differ by nan"):
        export_model(run, "last", tmp_path / "out")
    assert not left_in(tmp_path)


def test_a_disk_without_room_is_found_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 << 30, 10 << 30, 1 << 20))
    with pytest.raises(
        UsageError, match=r"--to: the weights take \S+ KiB, .* but .* has 1\S* MiB free; free some space"
    ):
        export_model(run, "last", tmp_path / "new/out")
    assert not left_in(tmp_path)


def test_a_disk_that_is_full_in_the_middle_leaves_nothing(run: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the same call of the system fails."""
    (tmp_path / "out").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*File too large.*\); nothing was left there"):
            export_model(run, "last", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(tmp_path) == {"out"}
    assert not left_in(tmp_path / "out")


def test_a_killed_export_leaves_no_folder_and_the_next_one_cleans_up(run: Path, tmp_path: Path) -> None:
    written, until = tmp_path / "written", time.monotonic() + 200
    child = fork(0, CASES + "export_and_stall", run, tmp_path / "out", written, env=os.environ)
    while not written.exists():
        assert child.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    written.unlink()
    (left,) = tmp_path.glob("out.*.partial")
    (left / "odd.safetensors").write_bytes(b"from before")
    export_model(run, "last", tmp_path / "out")
    assert left_in(tmp_path) == {"out"}
    assert "odd.safetensors" not in left_in(tmp_path / "out")


def test_a_link_to_an_empty_folder_and_the_folder_one_is_in_will_do(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far")
    export_model(run, "last", tmp_path / "link")
    assert "model.safetensors" in left_in(tmp_path / "far")
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_model(run, "1", Path("."))
    assert "model.safetensors" in left_in(tmp_path / "here")


def test_a_mounted_disk_is_no_place_but_a_folder_in_it_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "disk")
    with pytest.raises(UsageError, match="a disk is mounted there; name a folder inside it"):
        export_model(run, "last", tmp_path / "disk")
    export_model(run, "last", tmp_path / "disk/out")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil-was-here",)


def test_pickles_are_never_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrain.commands.trained_model import load_trained_model

    monkeypatch.chdir(tmp_path)
    export_model(run, "last", tmp_path / "out")
    whole = load_trained_model(tmp_path / "out", "best").model.state_dict()
    torch.save({"model.norm.weight": Evil()}, tmp_path / "out/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin may be a pickle"):
        load_trained_model(tmp_path / "out", "best")

    (tmp_path / "out/dstrain_recipe.yaml").unlink()  # as from somewhere else, where pickles were usual
    sets = [f"data.train={tmp_path}/none.jsonl"]
    assert load_trained_model(tmp_path / "out", "best", sets, "sft"), "beside safetensors nobody reads it"
    (tmp_path / "out/model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.* holds more than tensors.* so it was not read"):
        load_trained_model(tmp_path / "out", "best", sets, "sft")
    assert "evil-was-here" not in left_in(tmp_path)
    torch.save(whole, tmp_path / "out/pytorch_model.bin")
    again = load_trained_model(tmp_path / "out", "best", sets, "sft").model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3}, r"missing keys: model\.layers\.2\..*; unexpected keys: none"),
        ({"num_hidden_layers": 1}, r"missing keys: none; unexpected keys: model\.layers\.1\..*"),
        ({"intermediate_size": 64}, r"model\.layers\.0\.mlp\.\w+\.weight, .* has another shape"),
    ],
)
def test_a_config_of_another_model_is_refused(change: dict[str, Any], words: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    sets = [f"model.config.{key}={value}" for key, value in change.items()]
    with pytest.raises(CheckpointError, match=words):
        export_model(tmp_path / "run", "last", tmp_path / "out", sets)
    assert left_in(tmp_path) == {"run"}


@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        pytest.param("zero0", "fp32", marks=pytest.mark.slow),
        pytest.param("zero2", "bf16", marks=pytest.mark.slow),
        pytest.param("zero3", "fp32", marks=pytest.mark.slow),
        ("zero3", "bf16"),
    ],
)
def test_an_export_scores_as_the_run_does(
    preset: str, precision: str, recipe: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[f"ds_config={preset}", f"precision={precision}"])
    told = one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"))[0]
    assert told["step"] == 4
    assert told["dtype"] == ("float32" if precision == "fp32" else "bfloat16")
    assert told["difference"] <= (1e-5 if precision == "fp32" else 1e-2)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(told["files"])

    in_run = [row for row in metric_rows(tmp_path / "run") if row["split"] == "eval"][-1]
    data = str(tmp_path / "eval.jsonl")
    of_run = one(CASES + "evaluate", folder=str(tmp_path / "run"), data=data)[0]
    of_export = one(CASES + "evaluate", folder=str(tmp_path / "out"), data=data)[0]
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for name in ("loss", "accuracy", "margin"):
        assert of_run[name] == pytest.approx(in_run[name], abs=tolerance), name
        assert of_export[name] == pytest.approx(of_run[name], abs=tolerance), name


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rm", "sft, tied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3"])
def test_whoever_wrote_the_checkpoint_its_export_holds_it(
    preset: str, precision: str, task: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of one, two and three processes."""
    values = tiny_recipe(task[:3].strip(","), tmp_path) | (TIED if "tied" in task else {}) | {"steps": 2}
    values |= {"batch": {"total": 6, "micro": 2}, "ds_config": preset, "precision": precision, "save": {"every": 1}}
    write_recipe(tmp_path, values)
    one: Workers = request.getfixturevalue("one")
    for name in ("one", "two", "three"):
        run = tmp_path / name
        request.getfixturevalue(name)(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(run))
        for step in ("1", "last"):
            to = tmp_path / f"{name}-{step}"
            one(CASES + "export_only", run=str(run), to=str(to), step=step)
            kept = stored(str(run / f"checkpoints/step-0000000{2 if step == 'last' else 1}"))
            found = load_file(to / "model.safetensors")
            assert found.keys() == kept.keys()
            for key, value in kept.items():
                assert torch.equal(found[key], value.to(found[key].dtype)), key
            assert found[NORM].dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)


BIG = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048,
       "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16 from a folder", "bf16 merged", "bf16 adapters"])
def test_an_export_holds_the_model_once(kind: str, tmp_path: Path, one: Workers) -> None:
    """The peak of anonymous memory (RssAnon) above the process's own stays within the model's size and a fifth.

    Pages of files that were mapped are left out: the kernel drops them where somebody needs the memory. Of a model of
    640 MB the fifth is 128 MB: blocks of the checkpoint, activations, a few matrices in fp32. They do not grow with the
    number of layers. So is what glibc keeps of freed blocks: with its own threshold, which grows with the blocks, it is up
    to another sixth of the model.
    """
    runs = []
    for size, config in (("tiny", None), ("big", BIG | {"num_hidden_layers": 22 if kind == "fp32" else 44})):
        where = tmp_path / size
        where.mkdir()
        model: dict[str, Any] = {"config": config, "tokenizer": {"vocab_size": 320}} if config else {}
        if kind not in ("fp32", "bf16"):
            values = tiny_recipe("dpo", where)
            one(
                "tests.contract.lora_cases:save_base",
                folder=str(where / "base"),
                recipe=values | {"model": values["model"] | model},
            )
            model = {"path": str(where / "base"), "config": None, "tokenizer": None}
            model |= {} if "folder" in kind else {"lora": {"rank": 4}}
        one(CASES + "make_run_there", folder=str(where), task="dpo", changes={"model": model}, precision=kind[:4])
        runs.append(str(where / "run"))
    flags = ["--merge"] if "merged" in kind else []
    words = [sys.executable, "-m", "tests.contract.export_cases", *runs, str(tmp_path / "out"), *flags]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    before = peak = anonymous(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    while child.poll() is None:
        peak = max(peak, anonymous(child.pid))
        time.sleep(0.002)
    assert child.returncode == 0
    size = 640_000_000
    if "adapters" not in kind:
        written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
        assert written == pytest.approx(size, rel=0.05)
        size = written
    print(f"{kind}: peak {(peak - before) / 1e6:.0f} MB, {(peak - before) / size:.3f} of {size / 1e6:.0f} MB")
    assert peak - before < 1.2 * size


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that no file stands behind."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, one: Workers) -> tuple[str, dict[str, Any]]:
    """A base model of 60 MB in several files, without a head."""
    folder = tmp_path_factory.mktemp("base")
    recipe = tiny_recipe("rm", folder)
    big = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    recipe["model"]["config"] |= big
    one(CASES + "save_base", folder=str(folder / "model"), recipe=recipe)
    return str(folder / "model"), recipe | {"model": {"path": str(folder / "model")}}


def test_weights_and_a_new_head_are_equal_at_every_stage(
    base: tuple[str, dict[str, Any]], one: Workers, two: Workers
) -> None:
    folder, recipe = base
    plain = one(CASES + "load", folder=folder, recipe=recipe, preset="zero2")[0]
    assert "score.weight" in plain["sums"]
    for told in two(CASES + "load", folder=folder, recipe=recipe, preset="zero3"):
        assert told["sums"] == pytest.approx(plain["sums"], abs=1e-9)
        assert told["norm"] == pytest.approx(plain["norm"], abs=1e-9)


def test_at_stage_3_no_rank_holds_a_full_copy(base: tuple[str, dict[str, Any]], two: Workers) -> None:
    folder, recipe = base
    whole = two(CASES + "load", folder=folder, recipe=recipe, preset="zero2")
    sharded = two(CASES + "load", folder=folder, recipe=recipe, preset="zero3")
    size = whole[0]["bytes"]
    assert size > 50e6
    assert sharded[1]["peak"] < 0.8 * size, json.dumps([told["peak"] / size for told in (*whole, *sharded)])
