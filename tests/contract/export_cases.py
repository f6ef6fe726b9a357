"""Worker functions of the export and loading tests."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from dstrain.batch import Progress
from dstrain.commands.evaluate import EvaluateJob
from dstrain.commands.export import export_model
from dstrain.commands.generate import GenerateJob
from dstrain.commands.prepare import PrepareJob
from dstrain.commands.recipe_args import TrainRequest
from dstrain.commands.score import ScoreJob
from dstrain.commands.trained_model import ModelSelector, load_trained_model
from dstrain.config import dump_recipe
from dstrain.config.schema import RunConfig
from dstrain.distributed.world import SingleProcessWorld
from dstrain.ds_config import Device
from dstrain.models.params import build_param_groups, is_zero3, zero3_init
from dstrain.models.weights import weights_fingerprint
from dstrain.tasks import make_task
from dstrain.training import precompute_outputs
from dstrain.training.build_model import build_model
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.engine.module import TrainModule
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.input_digests import digest_model_files, dump_training_recipe
from dstrain.training.run_dir import save_base_config
from dstrain.training.state.files import CheckpointReader, write_state
from tests.parity.cases import ds_config, move, weights, world
from tests.resume.cases import run
from tests.tiny import tiny_recipe

OWN_MODULES = str(Path(__file__).with_name("own_modules.py"))
"""A task file, copied into the folder of the run."""


def export(run: str, to: str, step: str = "last") -> dict[str, Any]:
    """Export, then score one text with transformers only, unpadded."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    proof = export_model(Path(run), step, Path(to))
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(to).eval(), AutoTokenizer.from_pretrained(to)
    ids = tokenizer("\n\nHuman: How do I mend the pump?\n\nAssistant: Gladly: open it.", return_tensors="pt")[
        "input_ids"
    ]
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    with torch.no_grad():
        score = float(model(input_ids=ids).logits)
    return {"step": proof.step, "difference": proof.max_diff, "dtype": proof.dtype, "score": score,
            "model_dtype": str(model.dtype), "files": sorted(path.name for path in Path(to).iterdir())}  # fmt: skip


def evaluate(
    folder: str, data: str, task: str | None = None, sets: list[str] | None = None, step: str = "last",
    ds_config: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    choice = ModelSelector(folder=Path(folder), step=step, task=task, overrides=sets or [], ds_config=ds_config)
    return share(EvaluateJob(selector=choice, data=data))


def score(
    folder: str, data: str, out: str, sets: list[str] | None = None, ds_config: str | None = None
) -> dict[str, Any]:
    choice = ModelSelector(folder=Path(folder), step="last", overrides=sets or [], ds_config=ds_config)
    return share(ScoreJob(selector=choice, data=data, out=out))


def export_and_stall(run: Path, to: Path, written: Path) -> None:
    """Export up to the check of what was written, make the file `written`, and wait to be killed."""
    from dstrain.commands import export

    export._verify_reload = lambda *_: (written.touch(), time.sleep(600))  # type: ignore[assignment]
    export.export_model(run, "last", to)


def export_only(run: str, to: str, step: str = "last", merge: bool = False) -> None:
    export_model(Path(run), step, Path(to), merge_lora=merge)


def _own_module_recipe(folder: Path) -> dict[str, Any]:
    """Return a recipe with a copy of OWN_MODULES, which a test may move or change."""
    copy = folder / "own.py"
    copy.write_text(Path(OWN_MODULES).read_text())
    return {
        "task": str(copy), "batch": {"total": 4, "micro": 2}, "steps": 2, "optim": {"lr": 1e-2},
        "log": {"tensorboard": False},
    }  # fmt: skip


def make_run(folder: Path, task: str, changes: dict[str, Any] | None = None, precision: str = "fp32") -> Path:
    """Write a run folder with one checkpoint of a perturbed model, without taking a step; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = _own_module_recipe(folder) if task == OWN_MODULES else tiny_recipe(task, folder)
    for key, value in (changes or {}).items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    made: Any = make_task(RunConfig.model_validate(values))
    model = build_model(made)
    move(model)
    groups = build_param_groups(model, made.recipe.optim)
    engine = TorchEngine(TrainModule(made, model), groups, made.recipe.optim, torch.device("cpu"))
    record: dict[str, Any] = {"recipe": dump_training_recipe(made.recipe)}
    record |= {"base": weights_fingerprint(made.recipe.model, made.recipe.seed)} if made.recipe.model.lora else {}
    record["inputs"] = digest_model_files(made)
    checkpoints = CheckpointStore(folder=folder / "run/checkpoints", world=SingleProcessWorld())
    checkpoints.save(
        lambda path: write_state(path, engine.state_files(), engine.state_metadata()), Progress(1, 4), record
    )
    (folder / "run/recipe.yaml").write_text(dump_recipe(made.recipe))
    (folder / "run/ds_config.json").write_text(json.dumps({"bf16": {"enabled": precision == "bf16"}}))
    made.export.save_extras(folder / "run/tokenizer")
    save_base_config(made, folder / "run/model")
    return folder / "run"


def export_when_told(tiny: str, run: str, to: str, *flags: str) -> None:
    """`python -m tests.contract.export_cases TINY RUN TO [--merge]`: run in a process whose memory is measured.

    A tiny run is exported first, so that all late imports are done.
    """
    torch.set_num_threads(1)
    export_model(Path(tiny), "last", Path(to + "-tiny"), merge_lora="--merge" in flags)
    gc.collect()
    print("ready", flush=True)
    sys.stdin.readline()
    export_model(Path(run), "last", Path(to), merge_lora="--merge" in flags)


def make_run_there(folder: str, **wanted: Any) -> None:
    make_run(Path(folder), **wanted)


def read_as_a_stranger(folder: Path, scores: bool) -> tuple[Any, dict[str, Any]]:
    """Return the model loaded by transformers only, and its report of missing, unexpected and mismatched tensors."""
    import transformers

    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, output_loading_info=True)


def stored(checkpoint: str) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint."""
    state = CheckpointReader(Path(checkpoint))
    return {name: state.read_tensor(name) for name in state.shapes}


Change = Callable[[dict[str, torch.Tensor]], Any]


def spoil(monkeypatch: pytest.MonkeyPatch, change: Change, of: type | None = None) -> None:
    """Patch `save_pretrained` to change the written tensors. `of`: PeftModel for adapters; None: complete models."""
    from transformers import PreTrainedModel

    written = of or PreTrainedModel
    write, file = written.save_pretrained, "adapter_model.safetensors" if of else "model.safetensors"  # type: ignore[attr-defined]

    def save_pretrained(model: Any, folder: str, **settings: Any) -> None:
        write(model, folder, **settings)
        held = {name: value.clone() for name, value in load_file(Path(folder) / file).items()}
        change(held)
        save_file(held, Path(folder) / file, metadata={"format": "pt"})

    monkeypatch.setattr(written, "save_pretrained", save_pretrained)


def generate(
    folder: str, data: str, sampling: dict[str, Any], sets: list[str] | None = None, ds_config: str | None = None
) -> list[dict[str, Any]]:
    choice = ModelSelector(folder=Path(folder), step="last", overrides=sets or [], ds_config=ds_config)
    job = GenerateJob(selector=choice, data=data, sampling=sampling)
    ready = job.prepare(world().size, Device("cpu", True))
    assert is_zero3(ready.ds_config) == (ds_config == "zero3")
    return job.run(ready, world())


def answer_alone(folder: str, rows: list[dict[str, Any]], most: int) -> list[str]:
    """Return the answers to the rows' prompts by transformers' `generate`, one at a time, unpadded."""
    trained = load_trained_model(Path(folder), "last")
    tokenizer: Any = trained.task.tokenizer  # type: ignore[attr-defined]
    texts = []
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        found = trained.model.generate(ids, max_new_tokens=most, do_sample=False, eos_token_id=tokenizer.eos_token_id)  # type: ignore[operator]
        texts.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def prepare(recipe: str, sets: Sequence[str] = ()) -> dict[str, Any]:
    return share(PrepareJob(TrainRequest(recipe=recipe, overrides=sets)))


def share(job: Any) -> Any:
    """Return the result of a job that runs on all workers. Collective."""
    job.check_recipe()
    return job.run(job.prepare(world().size, Device("cpu", True)), world())


def train_counting(recipe: str, run_dir: str) -> int:
    """Train; return how many reference engines were built."""
    made: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        ask = precompute_outputs.ForwardEngine
        patch.setattr(precompute_outputs, "ForwardEngine", lambda *args: made.append(args) or ask(*args))
        run(recipe, run_dir)
    return len(made)


def save_base(folder: str, recipe: dict[str, Any]) -> None:
    """Save a base model without a head and its tokenizer, as on the Hub."""
    from transformers import AutoModel

    task: Any = make_task(RunConfig.model_validate(recipe))
    task.tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    AutoModel.from_config(task.model_source.config).save_pretrained(folder, max_shard_size="20MB")


def load(folder: str, recipe: dict[str, Any], preset: str) -> dict[str, Any]:
    """Build the model from its folder; return peak memory and sums of the weights. Collective."""
    task = make_task(RunConfig.model_validate(recipe))
    config = ds_config(preset, {"world_size": world().size})
    before, seen, done = psutil.Process().memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(psutil.Process().memory_info().rss - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    with zero3_init(config):
        model = task.build_model()
    done.set()
    thread.join()
    found = weights(model)
    return {
        "peak": max(seen),
        "bytes": sum(4 * value.size for value in found.values()),
        "sums": {name: float(value.sum()) for name, value in found.items()},
        "norm": float(np.sqrt(sum((value**2).sum() for value in found.values()))),
    }


if __name__ == "__main__":
    export_when_told(*sys.argv[1:])
