"""Compare the losses of `dstrain train` with task dpo and of TRL's trainers, step by step, in fp32.

    python -m benchmarks.trl_dpo [--kinds "sigmoid;ipo"] [--steps 50]

A small Llama from scratch and hh-rlhf's helpful pairs, the shortest first. Both start from the same weights and take the
same tokens in the same order at the same rates. Losses with the same formula in both must agree to 1e-3 at every step, else
nothing is reported. For orpo and rpo the SFT terms differ; the table shows by how much.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common import run
from benchmarks.trl_rm import pairs
from benchmarks.trl_side import DPO, ORPO, SIMPO, made_side, ordered, told, train_with_dstrain

LIMIT = 1e-3


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One loss, under its names in both libraries."""

    options: dict[str, Any]
    """Of dstrain's task."""
    trainer: str = DPO
    settings: dict[str, Any]
    """Of TRL's configuration."""
    agrees: bool = True
    """Whether the two are one formula."""
    total: int = 8
    """Pairs in a step."""
    micro: int | None = None
    """Pairs in a micro-batch, where a step has several."""


def _rpo(total: int, agrees: bool) -> Kind:
    return Kind(
        options={"rpo_alpha": 0.5}, settings={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        total=total, agrees=agrees,
    )  # fmt: skip


KINDS = {
    "sigmoid": Kind(options={}, settings={"loss_type": ["sigmoid"]}),
    "sigmoid, 2 x 4 pairs": Kind(options={}, settings={"loss_type": ["sigmoid"]}, micro=4),
    "sigmoid, reference asked before": Kind(
        options={"precompute_ref_log_probs": True},
        settings={"loss_type": ["sigmoid"], "precompute_ref_log_probs": True},
    ),
    "ipo": Kind(options={"loss_type": "ipo"}, settings={"loss_type": ["ipo"]}),
    "hinge": Kind(options={"loss_type": "hinge"}, settings={"loss_type": ["hinge"]}),
    "robust": Kind(
        options={"loss_type": "robust", "label_smoothing": 0.1},
        settings={"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "simpo": Kind(
        options={"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
        trainer=SIMPO,
        settings={"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
    ),
    "rpo, one pair a step": _rpo(1, True),
    "rpo": _rpo(8, False),
    "orpo": Kind(options={"loss_type": "orpo"}, trainer=ORPO, settings={}, agrees=False),
}


def short_pairs(path: Path, count: int, letters: int = 700) -> Path:
    """Return the first pairs whose texts are short, so that no prompt is truncated."""
    lines = Path(pairs("train")).read_text().splitlines()
    short = [
        line for line in lines if all(0 < len(json.loads(line)[side]) < letters for side in ("chosen", "rejected"))
    ]
    path.write_text("".join(line + "\n" for line in short[:count]))
    return path


def made_recipe(kind: Kind, train: Path, steps: int, lr: float) -> dict[str, Any]:
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "task": "dpo",
        "options": kind.options,
        "model": {"config": {"model_type": "llama", **shape, **heads}, "gradient_checkpointing": False},
        "data": {"train": str(train), "max_length": 512},
        "precision": "fp32",
        "ds_config": "zero0",
        "batch": {"total": kind.total, "micro": kind.micro or kind.total},
        "optim": {"lr": lr, "schedule": "cosine", "warmup": 0.1},
        "steps": steps,
        "log": {"every": 1, "tensorboard": False},
        "save": {"every": steps, "keep": 1},
    }


def measure(
    *, kinds: str = "", steps: int = 50, count: int = 200, lr: float = 1e-3, engine: str = "command"
) -> dict[str, Any]:
    """Train each loss with both libraries and compare every step."""
    folder = Path(tempfile.mkdtemp(prefix="dstrain-trl-"))
    train = short_pairs(folder / "pairs.jsonl", count)
    chosen = [name for name in KINDS if name in kinds.split(";")] if kinds else list(KINDS)
    rows = [_compared(name, made_recipe(KINDS[name], train, steps, lr), folder, engine) for name in chosen]
    worst = max((row["largest_difference"] for row in rows if KINDS[row["loss"]].agrees), default=0.0)
    return {
        "settings": {"steps": steps, "pairs": count, "lr": lr, "trl": version("trl"), "accelerate": version("accelerate")},
        "checked": f"where both are one formula, the losses of all steps differ by at most {worst:.1e} (limit {LIMIT:g})",
        "rows": rows,
    }  # fmt: skip


def _compared(name: str, recipe: dict[str, Any], folder: Path, engine: str) -> dict[str, Any]:
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task

    kind, task = KINDS[name], make_task(RunConfig.model_validate(recipe))
    side = made_side(kind.trainer, task, ordered(task), **kind.settings)
    side.trainer.train()
    ours = with_command(recipe, folder / name.replace(" ", "-")) if engine == "command" else with_torch(task)
    assert len(ours) == len(side.losses), f"{name}: dstrain took {len(ours)} steps, TRL {len(side.losses)}"
    apart = [abs(a - b) for a, b in zip(ours, side.losses, strict=True)]
    assert not kind.agrees or max(apart) <= LIMIT, f"{name}: losses differ by {max(apart):.1e}"
    return {
        "loss": name, "against": kind.trainer, "pairs_a_step": kind.total, "steps": len(apart),
        "largest_difference": max(apart), "first_difference": apart[0],
        "dstrain_first": ours[0], "trl_first": side.losses[0], "dstrain_last": ours[-1], "trl_last": side.losses[-1],
    }  # fmt: skip


def with_command(recipe: dict[str, Any], run_dir: Path) -> list[float]:
    """Return the losses that `dstrain train` writes."""
    train_with_dstrain(recipe, run_dir)
    return [row["loss"] for row in told(run_dir, "train")]


def with_torch(task: Any) -> list[float]:
    """Return the losses of the same steps by TorchEngine, in this process."""
    import torch

    from dstrain.models.params import build_param_groups
    from dstrain.schedule import LRSchedule
    from dstrain.training.build_model import build_train_module
    from dstrain.training.engine.torch import TorchEngine

    examples, optim, total = ordered(task), task.recipe.optim, task.recipe.batch.total
    objective = build_train_module(task)
    engine = TorchEngine(objective, build_param_groups(objective.model, optim), optim, torch.device("cpu"))
    rate = LRSchedule(optim.lr, optim.schedule, len(examples) // total, optim.warmup)
    losses = []
    for step in range(len(examples) // total):
        batch = task.collate(examples[step * total : (step + 1) * total])
        losses.append(float(engine.step([batch], rate(step)).loss) / batch.weight)
    return losses


if __name__ == "__main__":
    run(measure, __doc__ or "")
