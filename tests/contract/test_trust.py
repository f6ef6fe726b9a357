"""Nothing in a folder that is handed over runs, changes an environment or asks the network: that takes the user's word."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dstrain.cli import main
from dstrain.commands.export import export_model
from dstrain.commands.trained_model import find_saved_model
from dstrain.commands.untrusted import load_folder_recipe, read_forward_preset
from dstrain.config.schema import RunConfig
from dstrain.ds_config import Device, RunSettings, complete_preset
from dstrain.errors import EXIT_FAILED, EXIT_USAGE, UsageError
from dstrain.preset import preset_names, read_preset
from tests.contract.export_cases import make_run

OWN = """
from pathlib import Path
from dataclasses import dataclass
from dstrain.tasks.rm import RewardModel
Path({mark!r}).write_text("ran")

@dataclass(frozen=True, kw_only=True)
class Own(RewardModel):
    "Ours."
"""


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run` (a run folder), `exported`, and `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("handed")
    run = make_run(folder, "rm")
    export_model(run, "last", folder / "exported")
    return folder


@pytest.fixture
def folder(handed: Path, tmp_path: Path) -> Path:
    shutil.copytree(handed, tmp_path / "got", symlinks=True)
    return tmp_path / "got"


def change(recipe: Path, **values: Any) -> None:
    held = yaml.safe_load(recipe.read_text())
    for dotted, value in values.items():
        *above, name = dotted.split("__")
        block = held
        for key in above:
            if block.get(key) is None:
                block[key] = {}
            block = block[key]
        block[name] = value
    recipe.write_text(yaml.safe_dump(held))


def recipe_of(folder: Path, kind: str) -> Path:
    return folder / kind / ("recipe.yaml" if kind == "run" else "dstrain_recipe.yaml")


def dstrain(*words: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit this process to its present size and 2 GiB more."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


COMMANDS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "evaluate": lambda folder, there: ["evaluate", there, "--data", folder / "eval.jsonl", "--json"],
    "export": lambda folder, there: ["export", there, "--to", folder / "out"],
    "generate": lambda folder, there: ["generate", there, "--prompt", "Hello"],
    "score": lambda folder, there: ["score", there, "--data", folder / "eval.jsonl", "--out", "-"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["run", "exported"])
@pytest.mark.parametrize("named", ["a file", "a module"])
def test_a_folders_task_of_its_own_does_not_run(
    kind: str, command: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, evil = folder / "PWNED", folder / kind / "own_task.py"
    evil.write_text(OWN.format(mark=str(mark)))
    (folder / "package").mkdir()
    shutil.copy(evil, folder / "package/own.py")
    monkeypatch.syspath_prepend(folder)
    change(recipe_of(folder, kind), task=str(evil) if named == "a file" else "package.own")
    said = dstrain(*COMMANDS[command](folder, folder / kind))
    assert said.exit_code == 2, said.output
    assert "code that only the folder names is not run; add --task" in said.output
    if named == "a file":
        assert f"--task {shlex.quote(str(evil))} if you trust that file" in said.output
    assert not mark.exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["run", "exported"])
def test_the_sinks_of_a_folder_are_not_imported(kind: str, command: str, folder: Path) -> None:
    mark, evil = folder / "PWNED", folder / kind / "evil_sinks.py"
    evil.write_text(f"open({str(mark)!r}, 'w')")
    change(recipe_of(folder, kind), log__sinks=[f"{evil}:Evil", "evil_sinks.Evil"])
    dstrain(*COMMANDS[command](folder, folder / kind))
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["run", "exported"])
@pytest.mark.parametrize("word", ["--task {}", "--set task={}"])
def test_a_task_file_runs_only_if_the_user_names_it(kind: str, word: str, folder: Path) -> None:
    """Also for run folders, and by a copy that lies in the folder."""
    mark, own = folder / "ran", folder / kind / "task.py"
    own.write_text(OWN.format(mark=str(mark)))
    change(recipe_of(folder, kind), task="/gone/own_task.py")
    refused = dstrain(*COMMANDS["evaluate"](folder, folder / kind))
    assert refused.exit_code == 2
    assert f"add --task {shlex.quote(str(own))}" in refused.output
    assert not mark.exists()
    said = dstrain(*COMMANDS["evaluate"](folder, folder / kind), *word.format(own).split())
    assert said.exit_code == 0, said.output
    assert mark.exists()
    exported = dstrain(*COMMANDS["export"](folder, folder / kind), *word.format(own).split())
    assert exported.exit_code == 0, exported.output


def test_workers_are_told_the_users_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path that holds in another working folder, and they do not import from the one they start in."""
    from dstrain.commands.evaluate import EvaluateJob
    from dstrain.commands.trained_model import ModelSelector

    monkeypatch.chdir(folder)
    (folder / "own_task.py").write_text(OWN.format(mark=str(folder / "ran")))
    sets = ["model.trust_remote_code=true"]
    job = EvaluateJob(selector=ModelSelector(folder=Path("run"), task="own_task.py", overrides=sets), data="eval.jsonl")
    words = job.to_argv()
    assert words[words.index("--task") + 1] == str(folder / "own_task.py")
    assert words[words.index("--set") + 1] == sets[0]


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_a_folders_trust_in_remote_code_is_none(kind: str, folder: Path) -> None:
    mark = folder / "PWNED"
    (folder / kind / "evil_model.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json", "tokenizer/tokenizer_config.json"):
        file = folder / kind / name
        if file.is_file():
            values = json.loads(file.read_text())
            autos = {"AutoConfig": "evil_model.C", "AutoModelForSequenceClassification": "evil_model.M",
                     "AutoTokenizer": ["evil_model.T", None]}  # fmt: skip
            file.write_text(json.dumps(values | {"auto_map": autos, "model_type": "evil"}))
    asked = COMMANDS["evaluate"](folder, folder / kind)
    said = dstrain(*asked)  # trust_remote_code: false, as it is written
    # The run's model is built from its recipe, and transformers has a class for its tokenizer.
    assert said.exit_code == {"run": 0, "exported": 2}[kind], said.output
    assert not mark.exists()
    change(recipe_of(folder, kind), model__trust_remote_code=True)
    said = dstrain(*asked)
    assert said.exit_code == 2
    assert "model.trust_remote_code: is true, and code that only the folder names is not run; " in said.output
    assert "add --set model.trust_remote_code=true if you trust that code" in said.output
    assert not mark.exists()
    if kind == "exported":
        dstrain(*asked, "--set", "model.trust_remote_code=true")
        assert mark.exists(), "the user's word"


def test_a_folders_environment_is_not_applied(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LD_PRELOAD and PYTHONPATH load code."""
    change(recipe_of(folder, "run"), launch__env=["LD_PRELOAD=/tmp/evil.so"])
    launch = find_saved_model(folder / "run", "last").task.recipe.launch
    assert launch.env == []
    assert "launch.env comes from the folder and is not applied" in capsys.readouterr().err
    mine = find_saved_model(folder / "run", "last", ["launch.env=[A=1]"]).task.recipe.launch
    assert mine.env == ["A=1"]


def test_nothing_is_sent_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log.wandb is not read, and no library asks the hub for what a local folder has."""
    change(recipe_of(folder, "run"), log__wandb={"project": "theirs"}, log__tensorboard=True)
    asked: list[Any] = []
    monkeypatch.setattr("socket.socket.connect", lambda _, address: asked.append(address))
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **_: asked.append(words) or [])
    for command in ("evaluate", "export"):
        said = dstrain(*COMMANDS[command](folder, folder / "run"))
        assert said.exit_code == 0, said.output
    assert not asked
    assert sorted(path.name for path in (folder / "run").iterdir()) == [
        "checkpoints", "ds_config.json", "recipe.yaml", "tokenizer",
    ], "nothing was written into it"  # fmt: skip


def test_a_launch_does_not_import_from_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launching/test_terminal.py has a run in such a folder."""
    from dstrain.commands import run_job
    from dstrain.commands.evaluate import EvaluateJob
    from dstrain.commands.trained_model import ModelSelector

    seen: list[str] = []

    def launched(made: Any, place: Path) -> run_job.JobResult:
        seen.extend(made.argv)
        return run_job.JobResult(0)

    monkeypatch.setattr(run_job, "_launch_workers", launched)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    job = EvaluateJob(selector=ModelSelector(folder=folder / "run"), data=str(folder / "eval.jsonl"))
    run_job.run_job(job, {"num_gpus": 2}, None)
    assert "-P" in seen[: seen.index("-m")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__path", "nobody/nothing"),
        ("model__path", "nobodys-gpt2"),
        ("model__tokenizer", "nobody/nothing"),
        ("model__processor", "nobody/nothing"),
        ("options__ref_model", "nobody/nothing"),
        ("options__safety__harmless_rm", "nobody/nothing"),
        ("eval__generate__reward_model", "nobody/nothing"),
    ],
)
def test_a_folder_has_nothing_fetched(key: str, value: str, folder: Path) -> None:
    shutil.rmtree(folder / "run/tokenizer")
    own = {"task": "dpo"} if key.startswith(("options", "eval")) else {}
    change(recipe_of(folder, "run"), **{"model__config": None, "model__path": str(folder), key: value, **own})
    dotted = key.replace("__", ".")
    with pytest.raises(UsageError, match=f"{dotted}: names '{value}' on the hub.*add --set {dotted}={value}"):
        find_saved_model(folder / "run", "last")
    find_saved_model(folder / "run", "last", [f"{dotted}={value}"], "dpo")


@pytest.mark.parametrize("preset", preset_names())
def test_a_run_says_how_its_model_is_held_and_nothing_else(preset: str, folder: Path) -> None:
    settings = RunSettings(precision="bf16", micro=2, accumulate=2, world_size=2, clip=1.0, nvme_path="/elsewhere")
    held = complete_preset(read_preset(preset), settings=settings)
    spy = {"output_path": "/tmp/evil", "enabled": True}
    file = folder / "run/ds_config.json"
    file.write_text(json.dumps(held | {"tensorboard": spy, "csv_monitor": spy, "flops_profiler": {"output_file": "x"}}))
    found = read_forward_preset(folder / "run")
    assert found.stage == read_preset(preset).stage
    assert not {"tensorboard", "csv_monitor", "flops_profiler"} & found.block.keys()
    assert "/elsewhere" not in json.dumps(found.block)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"zero_optimization": {"stage": 3, "evil": 1}}', "zero_optimization.evil"),
        ('{"zero_optimization": 3}', "zero_optimization"),
        ('{"bf16": []}', None),
    ],
)
def test_an_odd_ds_config_is_said(text: str, problem: str | None, folder: Path) -> None:
    (folder / "run/ds_config.json").write_text(text)
    if problem is None:
        find_saved_model(folder / "run", "last")
        return
    with pytest.raises(UsageError, match=problem):
        find_saved_model(folder / "run", "last").build_ds_config(None, 2, Device("cpu", True))


@pytest.mark.parametrize("kind", ["exported", "run/tokenizer"])
def test_what_is_no_file_of_the_folder_is_not_read(kind: str, folder: Path) -> None:
    there, file = folder / kind.split("/")[0], folder / kind / "tokenizer.json"
    asked = COMMANDS["evaluate"](folder, there)
    shutil.move(file, folder / "elsewhere.json")
    file.symlink_to(folder / "elsewhere.json")
    assert "is a link to" in (said := dstrain(*asked)).output
    assert said.exit_code == 2
    file.unlink()
    file.symlink_to(file.name)
    assert "cannot be read (Too many levels of symbolic links)" in (said := dstrain(*asked)).output
    assert said.exit_code == 2
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in (said := dstrain(*asked)).output
    assert said.exit_code == 2
    file.unlink()
    (folder / kind / "kept.json").symlink_to("tokenizer_config.json")
    shutil.move(folder / "elsewhere.json", file)
    assert dstrain(*asked).exit_code == 0, "a link inside is a file of the folder"


@pytest.mark.parametrize("what", ["tokenizer", "tokenizer/deep"])
def test_a_folder_that_is_a_link_is_none_of_the_run(what: str, folder: Path) -> None:
    shutil.copytree(folder / "run/tokenizer", folder / "elsewhere")
    if what == "tokenizer":
        shutil.rmtree(folder / "run/tokenizer")
    (folder / "run" / what).symlink_to(folder / "elsewhere")
    with pytest.raises(UsageError, match=r"is a link to .*elsewhere.*, outside of the folder"):
        find_saved_model(folder / "run", "last")


def test_a_folder_of_the_hubs_cache_is_read(folder: Path) -> None:
    """models--ORG--NAME/snapshots/REVISION/FILE links to blobs/HASH."""
    snapshot, blobs = folder / "hub/snapshots/abc", folder / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (folder / "exported").iterdir():
        shutil.move(file, blobs / f"h-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/h-{file.name}")
    assert dstrain(*COMMANDS["evaluate"](folder, snapshot)).exit_code == 0


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("config.json", {"attn_implementation": "evil/kernel"}, "attn_implementation names code on the Hub"),
        ("config.json", {"_attn_implementation": {"": "evil/kernel"}}, "names code on the Hub"),
        ("config.json", {"text_config": {"attn_implementation": "evil/kernel"}}, "names code on the Hub"),
        ("adapter_config.json", {"megatron_config": {"a": 1}, "megatron_core": "evil"}, "a module to import"),
        ("adapter_config.json", {"peft_type": "XLORA"}, "peft_type is 'XLORA'"),
        ("adapter_config.json", [], "is not a JSON object"),
        ("adapter_config.json", {"target_modules": 5}, "target_modules is 5, but must be names of modules"),
        ("adapter_config.json", {"rank_pattern": 7}, "rank_pattern is 7, but must be names of modules"),
        ("adapter_config.json", {"layers_pattern": True}, "layers_pattern is True, but must be names of modules"),
    ],
)
def test_libraries_import_nothing_that_a_folder_names(name: str, values: Any, problem: str, folder: Path) -> None:
    file = folder / "exported" / name
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(held | values if isinstance(values, dict) else values))
    said = dstrain(*COMMANDS["evaluate"](folder, folder / "exported"))
    assert (said.exit_code, problem in said.output) == (2, True), said.output


def test_a_model_config_names_no_kernel(folder: Path) -> None:
    change(recipe_of(folder, "run"), model__config={"model_type": "llama", "_attn_implementation": "evil/kernel"})
    with pytest.raises(UsageError, match="names code on the Hub"):
        find_saved_model(folder / "run", "last")


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer", "model.processor", "options.ref_model"])
@pytest.mark.parametrize("kind", ["a model", "an adapter"])
def test_no_model_that_a_recipe_names_brings_a_kernel(key: str, kind: str, folder: Path) -> None:
    """Of an adapter's folder, the model that it was trained on does not either."""
    there = folder / "evil"
    there.mkdir()
    (there / "config.json").write_text(
        '{"model_type": "llama", "text_config": {"_attn_implementation": "evil/kernel"}}'
    )
    if kind == "an adapter" and key in ("model.path", "options.ref_model"):
        there = write_adapter(folder / "adapter", there)
    section, name = key.split(".")
    values = {"options__ref_model": str(there)} if section == "options" else {f"model__{name}": str(there)}
    values["task"] = "dpo"  # with --task of another one the folder's options would be dropped
    change(recipe_of(folder, "run"), **{"model__config": None, **values} if name == "path" else values)
    with pytest.raises(
        UsageError, match=r"evil/config.json: _attn_implementation names code on the Hub \('evil/kernel"
    ):
        load_folder_recipe(recipe_of(folder, "run"), [], [], "dpo")
    load_folder_recipe(recipe_of(folder, "run"), [], [f"{key}={there}"], "dpo")  # the user's word


def write_adapter(at: Path, base: Path) -> Path:
    at.mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "target_modules": ["q_proj"]}
    (at / "adapter_config.json").write_text(json.dumps(about))
    (at / "adapter_model.safetensors").write_bytes(b"")
    return at


def test_what_stands_in_place_of_the_link_best_is_not_read(folder: Path) -> None:
    """A second copy (cp -rL, zip), a file with the link's text (object stores), and what it never was."""
    checkpoints = folder / "run/checkpoints"
    best = checkpoints / "best"
    shutil.copytree(checkpoints / "step-00000001", best)
    assert find_saved_model(folder / "run", "best").checkpoint.path == checkpoints / "step-00000001"  # type: ignore[union-attr]
    for make in (
        lambda: best.write_text("step-00000001"),
        lambda: best.write_text("a" * 100),
        lambda: best.symlink_to("/etc"),
        lambda: best.symlink_to("best"),
        lambda: os.mkfifo(best),
        best.mkdir,
    ):
        shutil.rmtree(best) if best.is_dir() and not best.is_symlink() else best.unlink()
        make()
        assert find_saved_model(folder / "run", "best").step == 1
        assert dstrain("checkpoints", folder / "run").exit_code == 0


def test_a_recipe_that_the_user_names_is_the_users_word(folder: Path) -> None:
    """`dstrain train RECIPE` is asked to run it."""
    mark = folder / "ran"
    (folder / "run/own_task.py").write_text(OWN.format(mark=str(mark)))
    change(recipe_of(folder, "run"), task="./own_task.py")
    said = dstrain("train", recipe_of(folder, "run"), "--run-dir", folder / "new", "--dry-run")
    assert (said.exit_code, mark.exists()) == (0, True), said.output


def test_nothing_of_a_run_folders_recipe_runs_where_training_goes_on(folder: Path) -> None:
    """The recipe comes from the command line; the folder's is compared with it."""
    mine, mark = folder / "mine.yaml", folder / "PWNED"
    shutil.copy(recipe_of(folder, "run"), mine)
    (folder / "run/task.py").write_text(OWN.format(mark=str(mark)))
    change(recipe_of(folder, "run"), task=str(folder / "run/task.py"), model__trust_remote_code=True)
    for resume in ([], ["--resume", folder / "run"]):
        dstrain("train", mine, "--run-dir", folder / "run", *resume, "--dry-run")
        assert not mark.exists()


def test_the_schema_has_no_other_key_that_names_code() -> None:
    """A key added later is looked at here: does a folder's recipe reach code, a shell or the network by it?"""
    assert [*RunConfig.model_fields] == [
        "task", "options", "model", "precision", "data", "ds_config", "batch", "parallel", "optim", "steps", "epochs",
        "seed", "deterministic", "on_nonfinite", "timeout_minutes", "log", "eval", "save", "profile", "launch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("metric", value) for value in ("abc", [], {}, True, 10**400)),
        *(("zero_stage", value) for value in ([], {}, "3", -1)),
        *(("samples", value) for value in (None, "x", -1, 1.5, 10**400)),
        ("world_size", [1]),
    ],
)
def test_odd_values_in_a_manifest_are_damage(key: str, value: Any, folder: Path) -> None:
    checkpoint = folder / "run/checkpoints/step-00000001"
    record = json.dumps(json.loads((checkpoint / "run.json").read_text()) | {key: value}).encode()
    (checkpoint / "run.json").write_bytes(record)
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text()) | {key: value}
    manifest["files"]["run.json"] = {"size": len(record), "sha256": [hashlib.sha256(record).hexdigest()]}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))
    said = dstrain("checkpoints", folder / "run")
    assert f"as {key}" in said.output
    assert "damaged" in said.output


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [("MANIFEST.json", EXIT_USAGE), ("state/about.json", EXIT_FAILED), ("state/index.json", EXIT_FAILED)],
)
def test_deep_json_in_a_checkpoint_is_damage(name: str, exit_code: int, folder: Path) -> None:
    """Without a whole checkpoint nothing starts; what is damaged behind a whole manifest is found while it is loaded."""
    checkpoint, content = folder / "run/checkpoints/step-00000001", b"[" * 200_000
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["files"][name] = {"size": len(content), "sha256": [hashlib.sha256(content).hexdigest()]}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))
    (checkpoint / name).write_bytes(content)
    said = dstrain(*COMMANDS["evaluate"](folder, folder / "run"))
    assert said.exit_code == exit_code, said.output
    assert isinstance(said.exception, SystemExit), said.exception
    (checkpoint / "MANIFEST.json").unlink()
    os.mkfifo(checkpoint / "MANIFEST.json")
    assert "damaged: it cannot be read: is not a regular file" in dstrain("checkpoints", folder / "run").output


@pytest.mark.parametrize("name", ["MANIFEST.json", "run.json"])
def test_a_huge_file_of_a_checkpoint_is_damage(name: str, folder: Path) -> None:
    checkpoint = folder / "run/checkpoints/step-00000001"
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["files"]["run.json"] = {
        "size": 1 << 33,
        "sha256": [hashlib.sha256(bytes(4 << 20)).hexdigest()] * (1 << 11),
    }
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))
    os.truncate(checkpoint / name, 1 << 33)
    os.truncate(checkpoint / "run.json", 1 << 33)
    with limited_memory():
        said = dstrain("checkpoints", folder / "run")
    assert "larger than" in said.output


@pytest.mark.parametrize("layers", [10**9, 100])
def test_an_exported_config_with_layers_that_its_files_lack_is_refused(layers: int, folder: Path) -> None:
    file = folder / "exported/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers}))
    with limited_memory():
        said = dstrain(*COMMANDS["evaluate"](folder, folder / "exported"))
    assert said.exit_code == 2, said.output
    assert (
        "config.json: num_hidden_layers is 1000000000" if layers > 100 else "does not hold all weights"
    ) in said.output


def test_a_huge_recipe_is_refused(folder: Path) -> None:
    os.truncate(folder / "run/recipe.yaml", 1 << 33)
    with limited_memory():
        for command in ("evaluate", "export"):
            said = dstrain(*COMMANDS[command](folder, folder / "run"))
            assert said.exit_code == 2, said.output
            assert "recipe.yaml: cannot be read (is larger than 1 MiB)" in said.output


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_run_with_another_tokenizer_is_refused(command: str, folder: Path) -> None:
    file = folder / "run/tokenizer/tokenizer.json"
    values = json.loads(file.read_text())
    vocab = values["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(values))
    words = COMMANDS[command](folder, folder / "run")
    refused = dstrain(*words)
    assert refused.exit_code == 2, refused.output
    assert f"{file.parent}: its content is not what the run was trained on (step " in refused.output
    assert "name a tokenizer: --set model.tokenizer=FOLDER" in refused.output
    named = dstrain(*words, "--set", f"model.tokenizer={folder}/exported")
    assert named.exit_code == 0, named.output


def test_a_run_with_another_model_config_is_refused(folder: Path) -> None:
    """The weights fit, and mean something else."""
    change(recipe_of(folder, "run"), model__config__rms_norm_eps=0.5)
    words = COMMANDS["evaluate"](folder, folder / "run")
    refused = dstrain(*words)
    assert refused.exit_code == 2, refused.output
    assert "recipe.yaml model.config: is not what the run was trained with (step " in refused.output
    assert dstrain(*words, "--set", "model.config.rms_norm_eps=0.5").exit_code == 0


def test_a_run_without_its_tokenizer_gets_no_other_one(folder: Path) -> None:
    """One would be trained on whatever data.train holds now, or be fetched."""
    shutil.rmtree(folder / "run/tokenizer")
    with pytest.raises(
        UsageError, match=r"run/tokenizer: does not exist, and only .*; copy the whole run, or add --set mod"
    ):
        find_saved_model(folder / "run", "last")
    assert find_saved_model(folder / "run", "last", [f"model.tokenizer={folder}/exported"])


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_a_folders_dataset_on_the_hub_is_not_fetched_to_probe_with(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    held_out = {"path": "nobody/nothing", "split": "test", "name": None}
    change(recipe_of(folder, kind), data__eval=held_out)
    said = dstrain(*COMMANDS["export"](folder, folder / kind))
    assert said.exit_code == 2
    assert (
        "data: names 'nobody/nothing' on the hub, which is not in this machine's cache, and is not downloaded"
        in said.output
    )
    own = dstrain(*COMMANDS["export"](folder, folder / kind), "--set", f"data.eval={folder}/eval.jsonl")
    assert own.exit_code == 0, own.output


def test_no_processor_of_a_folder_is_code(tmp_path: Path) -> None:
    """Each of its files may name classes beside it, and a class that transformers does not know."""
    run, mark = make_run(tmp_path, "vlm"), tmp_path / "PWNED"
    (tmp_path / "a.png").symlink_to("a.png")
    said = dstrain("generate", run, "--prompt", "hi", "--image", tmp_path / "a.png")
    assert (said.exit_code, "Too many levels of symbolic links" in said.output) == (2, True), repr(said.exception)
    there = run / "tokenizer"
    (there / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    autos = {"AutoProcessor": "evil.P", "AutoImageProcessor": "evil.I", "AutoTokenizer": ["evil.T", "evil.T"],
             "AutoConfig": "evil.C"}  # fmt: skip
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "config.json"):
        held = (there / name).read_text() if (there / name).is_file() else None
        odd = dict.fromkeys(("processor_class", "tokenizer_class", "image_processor_type"), "Evil")
        (there / name).write_text(json.dumps(json.loads(held or "{}") | {"auto_map": autos} | odd))
        words = COMMANDS["evaluate"](tmp_path, run)
        said = CliRunner().invoke(main, [*map(str, words)], input="y\ny\n")
        is_read = name in ("processor_config.json", "tokenizer_config.json")  # the others are not, beside these
        assert said.exit_code == (2 if is_read else 0), said.output
        assert not mark.exists()
        if is_read:
            assert "add --set model.trust_remote_code=true if you trust" in said.output
        (there / name).unlink() if held is None else (there / name).write_text(held)
