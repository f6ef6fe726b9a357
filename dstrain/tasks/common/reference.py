"""Base class of tasks that keep a policy near a reference model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.checks import check_frozen_model
from dstrain.models.folder import check_local_folder, read_adapter
from dstrain.models.load import read_config
from dstrain.tasks.common.task import LossInputs, Reference, ReferenceKind
from dstrain.tasks.common.text import TextChecks, TextExport, TextTask, model_unsupported_reason

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ReferenceChecks(TextChecks):
    """The checks of a text task, and of its reference's folder."""

    task: FrozenReferenceTask

    def required_keys(self) -> None:
        super().required_keys()
        self.reference()

    def model_faults(self) -> list[Fault]:
        other, trusted = self.task.reference_path, self.task.recipe.model.trust_remote_code
        return [
            *super().model_faults(),
            *(check_frozen_model(other, self.task.reference_option, trusted) if other else []),
        ]

    def reference(self) -> None:
        if self.task.reference_path:
            check_local_folder(self.task.reference_path, self.task.reference_option)


@dataclass(frozen=True)
class ReferenceExport(TextExport):
    """Exports a policy with its reference named in the recipe next to it."""

    task: ReferenceTask

    def recipe(self, merged: bool) -> RunConfig:
        """Return the recipe with the reference as `ref_model`, where a folder or the hub has it."""
        task = self.task
        recipe, model = super().recipe(merged), task.recipe.model
        is_base = model.lora is not None and not merged and model.lora.create_new_adapter
        if task.reference_kind == "none" or task.ref_model or is_base:
            return recipe
        if model.path is None or model.init is not None:
            return recipe
        return recipe.model_copy(update={"options": {**recipe.options, "ref_model": model.path}})


@dataclass(frozen=True, kw_only=True)
class FrozenReferenceTask(TextTask):
    """A task whose loss reads outputs of another model, which is not trained."""

    path_options: ClassVar[tuple[str, ...]] = ("ref_model",)
    """The option that names the other model first."""

    precompute_ref_log_probs: bool = False
    """Compute the reference's outputs once, before training, and cache them: no second model in memory."""

    @cached_property
    def checks(self) -> ReferenceChecks:
        return ReferenceChecks(parse_record=self.parse_record, task=self)

    @property
    def reference_path(self) -> str | None:
        """Folder or hub id of the other model; None: the initial policy."""
        path: str | None = getattr(self, self.path_options[0])
        return path

    @property
    def reference_option(self) -> str:
        """Recipe key of `reference_path`."""
        return f"options.{self.path_options[0]}"

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        reason = super().packing_unsupported_reason(shares_prefixes)
        if reason or not self.reference_path:
            return reason
        reference = self.reference_config
        try:
            config = read_config(reference)
        except RecipeError:
            # A trained policy is used without its reference, whose folder may be gone; a run names it.
            return f"of {self.reference_option}: its config cannot be read"
        reason = model_unsupported_reason(reference, config, shares_prefixes, self.recipe.parallel.sequence)
        return f"of {self.reference_option}: {reason}" if reason else None

    @property
    def loss_inputs(self) -> LossInputs:
        reference = Reference(
            kind=self.reference_kind,
            recipe_key=self.reference_option if self.reference_path else None,
            config=self.reference_config,
            build=self.build_reference,
            outputs=self.reference_outputs,
            key=self.reference_key,
        )
        return replace(super().loss_inputs, reference=reference)

    @cached_property
    def reference_kind(self) -> ReferenceKind:
        """Source of the reference's outputs."""
        return "cached" if self.precompute_ref_log_probs else "model"

    @property
    def reference_config(self) -> ModelConfig:
        """The model that the reference is loaded from."""
        # Without the policy's init and new adapters, which are not the reference's.
        model = self.recipe.model
        if not self.reference_path and model.lora is not None and not model.lora.create_new_adapter:
            return model
        own = (
            dict.fromkeys(("revision", "config", "init")) | {"path": self.reference_path} if self.reference_path else {}
        )
        return self.recipe.model.model_copy(update={**own, "lora": None})

    @property
    def reference_key(self) -> Mapping[str, Any]:
        """What the reference's outputs depend on besides data, model and precision."""
        return {}

    def build_reference(self) -> torch.nn.Module:
        """Load the reference as a whole model. Collective under ZeRO-3."""
        from dstrain.models.adapters import continue_adapter
        from dstrain.models.init_weights import load_init
        from dstrain.models.quantization import quantize_model

        wanted = self.reference_config
        model = self.model_source.load(wanted)
        if wanted.init is not None:
            load_init(model, wanted.init)
        if wanted.quantize is not None:
            quantize_model(model, wanted.quantize, self.export.modules_to_save)
        adapter = None if wanted.lora is None else read_adapter(wanted.path)
        if adapter is not None:  # the policy's, before its training
            model = continue_adapter(model, adapter, (), 0.0, self.recipe.seed).get_base_model()
        return self.enable_packing(model)

    def cached_target_outputs(self, examples: Sequence[Mapping[str, Any]], batch: Batch) -> dict[str, torch.Tensor]:
        """Return the precomputed outputs of each target, (B, K, …); empty where there are none."""
        from dstrain.data.loading.rows import place_targets

        return {
            name: place_targets([example[name] for example in examples], batch.tensors["loss_mask"])
            for name in self.ref_columns
            if name in examples[0]
        }

    @abstractmethod
    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the reference's outputs on a batch, (B, …) each, under the names of `ref_columns`."""


@dataclass(frozen=True, kw_only=True)
class ReferenceTask(FrozenReferenceTask):
    """A task that compares the log-probabilities of answers under the policy and a reference."""

    learning_rate = 1.0e-6

    beta: float = 0.1
    """Strength of the penalty on the divergence from the reference."""
    ref_model: str | None = None
    """Folder or hub id of another reference; empty: the initial policy."""
    disable_dropout: bool = True
    """Train without dropout, so that policy and reference differ by their weights only."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta:g}, but it must be above 0")

    @cached_property
    def reference_kind(self) -> ReferenceKind:
        kind = super().reference_kind
        is_policy = self.recipe.model.lora is not None and self.ref_model is None
        return "adapter" if kind == "model" and is_policy else kind

    @property
    def export(self) -> ReferenceExport:
        return ReferenceExport(self, self.modules_to_save)

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        from dstrain.tasks.common.forward import answer_log_probs

        return answer_log_probs(model, batch)
