"""The reference of a text task: a model that is not trained, and whose outputs a loss reads."""

# Shapes: B examples, K targets.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError
from dstrain.models.folder import read_adapter
from dstrain.models.load import read_config
from dstrain.tasks.common.packing import model_unsupported_reason
from dstrain.tasks.common.task import Reference, ReferenceKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Options of a task that compares the log-probabilities of answers under the policy and a reference."""

    precompute_ref_log_probs: bool = False
    """Compute the reference's outputs once, before training, and cache them: no second model in memory."""
    beta: float = 0.1
    """Strength of the penalty on the divergence from the reference."""
    ref_model: str | None = None
    """Folder or hub id of another reference; empty: the initial policy."""
    disable_dropout: bool = True
    """Train without dropout, so that policy and reference differ by their weights only."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta:g}, but it must be above 0")

    def get_reference_kind(self, recipe: RunConfig) -> ReferenceKind:
        """Return where the reference's outputs come from: the cache, the policy without its adapters, or a second model."""
        if self.precompute_ref_log_probs:
            return "cached"
        return "adapter" if recipe.model.lora is not None and self.ref_model is None else "model"


def make_reference(
    task: Any,
    kind: ReferenceKind,
    outputs: Callable[[torch.nn.Module, Batch], Mapping[str, torch.Tensor]],
    path: str | None,
    option: str = "ref_model",
    key: Mapping[str, Any] | None = None,
) -> Reference:
    """Return the reference of a `TextTask`.

    Its `outputs` are tensors of the batch when `loss` runs, whether they were computed in the same step or cached:
    `cached_outputs` puts those into the batch. `path`: what the option names; None: the initial policy. `key`: what
    the outputs depend on besides data, model and precision.
    """
    config = _get_reference_config(task.recipe.model, path)
    return Reference(
        kind=kind,
        recipe_key=f"options.{option}" if path else None,
        config=config,
        build=partial(load_reference, task, config),
        outputs=outputs,
        key=key or {},
    )


def _get_reference_config(policy: ModelConfig, path: str | None) -> ModelConfig:
    """Return the model that the reference is loaded from, without the policy's init and new adapters."""
    if not path and policy.lora is not None and not policy.lora.create_new_adapter:
        return policy
    changes: dict[str, Any] = {"lora": None}
    if path:
        changes |= {"path": path, "revision": None, "config": None, "init": None}
    return policy.model_copy(update=changes)


def load_reference(task: Any, config: ModelConfig) -> torch.nn.Module:
    """Load a reference as a whole model, for the batches of a `TextTask`. Collective under ZeRO-3."""
    from dstrain.models.adapters import continue_adapter
    from dstrain.models.init_weights import load_init
    from dstrain.models.quantization import quantize_model

    model: torch.nn.Module = task.model_source.load(config)
    if config.init is not None:
        load_init(model, config.init)
    if config.quantize is not None:
        quantize_model(model, config.quantize, task.modules_to_save)
    adapter = None if config.lora is None else read_adapter(config.path)
    if adapter is not None:  # the policy's, before its training
        model = continue_adapter(model, adapter, (), 0.0, task.recipe.seed).get_base_model()
    prepared: torch.nn.Module = task.enable_packing(model)
    return prepared


def reference_unsupported_reason(reference: Reference, shares_prefixes: bool, sequence: int) -> str | None:
    """Return why a reference of its own cannot take packed batches, or None."""
    try:
        config = read_config(reference.config)
    except RecipeError:
        # A trained policy is used without its reference, whose folder may be gone; a run names it.
        return f"of {reference.recipe_key}: its config cannot be read"
    reason = model_unsupported_reason(reference.config, config, shares_prefixes, sequence)
    return f"of {reference.recipe_key}: {reason}" if reason else None


def cached_outputs(examples: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the precomputed outputs of the reference, (B,) each; empty where the examples have none."""
    import torch

    return {
        # float64, as the cache holds them: no digit of the sums, which are float32 at least, is lost.
        name: torch.tensor([example[name] for example in examples], dtype=torch.float64)
        for name in names
        if name in examples[0]
    }


def cached_target_outputs(
    examples: Sequence[Mapping[str, Any]], names: Sequence[str], loss_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the precomputed outputs of each target, (B, K, …); empty where the examples have none."""
    from dstrain.data.loading.rows import place_targets

    return {
        name: place_targets([example[name] for example in examples], loss_mask) for name in names if name in examples[0]
    }
