"""dstrain: train reward models, policies and vision-language models on DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from dstrain.commands.notebook import Run, TrainedModel

__version__ = "0.1.0"


def load_reward_model(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the reward model of a folder that `dstrain export` wrote, in evaluation mode.

    Call it with the outputs of its tokenizer or processor (input_ids, attention_mask, pixel_values,
    ...): `logits` of its output, shape (B, 1) for B rows, are the scores, read at the last token
    that is not padding. `dtype` of the weights: None for that of the export. Raises UsageError for
    a folder without a reward model.
    """
    from dstrain.models.reward_model import load_reward_model as load

    return load(folder, dtype)


def load(
    run_or_export: str | Path,
    *,
    step: str = "best",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> TrainedModel:
    """Load the model of a run folder, at `step`, or of an exported folder, in evaluation mode.

    `device`: default the first GPU, else the CPU. Raises UsageError.
    """
    from dstrain.commands.notebook import load as read

    return read(run_or_export, step, task, overrides or {}, device)


def evaluate(
    run_or_export: str | Path,
    data: str | Path,
    *,
    step: str = "best",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    **launch: Any,
) -> dict[str, Any]:
    """Return the metrics of a run's checkpoint, or of an exported folder, on a file: those of `dstrain evaluate --json`.

    `launch`: `num_gpus` and the other launch options. Raises UsageError, RunError.
    """
    from dstrain.commands.notebook import evaluate as run

    return run(run_or_export, data, step, task, overrides or {}, launch)


def export(
    run: str | Path,
    to: str | Path,
    *,
    step: str = "best",
    task: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    merge_lora: bool = False,
    max_shard_size: str | None = None,
    license: str | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
) -> Path:
    """Write a folder that transformers loads, with a model card, as `dstrain export` does; return it.

    `push_to_hub`: OWNER/NAME to upload it to. Raises UsageError, CheckpointError; RunError where the upload fails, and the
    folder stays.
    """
    from dstrain.commands.notebook import export as write

    target = {"license": license, "repo_id": push_to_hub, "private": private}
    return write(run, to, step, task, overrides or {}, merge_lora, max_shard_size, **target)


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    allow_change: Sequence[str] = (),
    in_process: bool = False,
    **launch: Any,
) -> Run:
    """Train as `dstrain train` does, with its checks, and return the run.

    `recipe`: a YAML file, the name of a packaged recipe, or a dict with the keys of a recipe. `overrides`: key -> value,
    such as {"optim.lr": 2e-5}. `run_dir`: default runs/NAME of the recipe, runs/TASK for a dict. `launch`: `num_gpus`,
    `hostfile` and the other launch options. The ranks are processes of their own, whose output is printed; with
    `in_process` the run is this process, on one GPU or the CPU, and a debugger reaches it. Ctrl-C, or Jupyter's
    interrupt, stops the run after a checkpoint. Raises UsageError for a recipe or data that are refused, RunError for a
    run that fails.
    """
    from dstrain.commands.notebook import train as start

    return start(recipe, overrides or {}, run_dir, resume, allow_change, in_process, launch)
