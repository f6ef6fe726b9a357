"""Base class of tasks and of their optional parts: reference, loss inputs, generation, checks, export.

B rows of a batch. Packaged tasks import torch inside methods, so that `dstrain tasks` answers on a
login node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from dstrain.batch import PADDED, Batch, PackingMode
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.data.dataset import Dataset, Samples, as_dataset
from dstrain.errors import TaskError

if TYPE_CHECKING:
    import torch

    from dstrain.data.encoding.prompts import EncodedPrompt
    from dstrain.data.vision.processor import VisionProcessor

Split = Literal["train", "eval"]
DATA_KEYS = ("columns", "eval_fraction", "eval_group", "max_samples", "on_error", "weight")
"""Keys of `data`, and of an item of data.train, that say which records of the files are used."""
ReferenceKind = Literal["none", "model", "adapter", "cached"]
"""No reference; a frozen copy in memory; the model with LoRA switched off; precomputed outputs."""
Outputs = Mapping[str, "torch.Tensor"]
Sums = Mapping[str, "torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]"]
"""Name -> sum over the batch, or (sum, weight) where the weight is not the batch's."""
EXPORT_RECIPE = "dstrain_recipe.yaml"
"""File of an exported folder: the recipe with task and options."""


@dataclass(frozen=True)
class Loss:
    """The sums of one forward pass. dstrain divides each by its weight over the whole step."""

    total: torch.Tensor
    """Scalar, differentiable: the sum over the batch, not the mean."""
    metrics: Sums = field(default_factory=dict)
    """Name -> sum over the batch, or (sum, its own weight). For `perplexity` sum -log p: exp of the mean is reported."""


def _missing(name: str) -> Any:
    raise TaskError(f"the task's Reference has no `{name}`; give Reference(kind=..., {name}=...)")


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model that is not trained, and whose outputs a loss reads."""

    config: ModelConfig = field(default_factory=ModelConfig)
    """The model that `build` loads. It is part of the key under which outputs are cached."""
    build: Callable[[], torch.nn.Module] = field(default=lambda: _missing("build"))
    """Returns the whole model. Collective under ZeRO-3."""
    outputs: Callable[[torch.nn.Module, Batch], Outputs] = field(default=lambda model, batch: _missing("outputs"))
    """(frozen model, batch) -> name -> (B, ...). Called without gradients, with the same names for
    every batch. `loss` finds the tensors in its batch."""
    key: Mapping[str, Any] = field(default_factory=dict)
    """What the outputs depend on besides data, model and precision. It is part of the key of cached outputs."""


@dataclass(frozen=True, kw_only=True)
class Reference(FrozenModel):
    """The model that a loss compares the trained one with."""

    kind: ReferenceKind = "none"
    """Source of its outputs."""


@dataclass(frozen=True, kw_only=True)
class Scorer(FrozenModel):
    """A frozen reward model of a task's samples. `outputs` takes batches of `task` if it is cached, else of the policy."""

    name: str
    """Prefix of its outputs, such as `harmless`."""
    recipe_key: str
    """Recipe key that names its folder."""
    is_cached: bool
    """True where its outputs are computed before training; else it is held next to the policy."""
    task: Task
    """The reward model's own task on the same data: its tokens, template and processor."""
    prepare: Callable[[Dataset, Split], Dataset]
    """Returns the samples of a split with the tokens that `task` reads, if it is cached.

    Raises RecipeError for a folder that cannot be used, DataError for samples that it cannot score."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Tensors that are computed without gradients before `loss`, which finds them in its batch."""

    reference: Reference = field(default_factory=Reference)
    scorers: Sequence[Scorer] = ()
    """Frozen reward models that score the samples."""
    select: Callable[[Dataset, Split], Dataset] | None = None
    """Returns the samples of a split that are used, once the outputs of cached frozen models are in them."""
    step_stats: Callable[[torch.nn.Module, Batch], Sums] | None = None
    """(model, batch) -> sums, of which `loss` finds the means over all batches of all ranks.

    Called for every batch of a step, or of an evaluation, before the first loss. Like `loss` it runs
    the model once, on every rank."""
    packing: Callable[[], PackingMode] = lambda: PADDED
    """Returns the form of the batches that `collate` makes, from which the tokens of a micro-batch are predicted.

    A function, since it reads the models' configs, which imports torch."""
    update_weight: Callable[[Batch], Batch] | None = None
    """Returns a batch with the weight that follows from tensors computed in its step, before weights are added up
    over the ranks. Not called for fillers. None: the weight from `collate` is final."""

    @property
    def caches_outputs(self) -> bool:
        """True where outputs of frozen models are computed before training."""
        return self.reference.kind == "cached" or any(scorer.is_cached for scorer in self.scorers)


@dataclass(frozen=True, kw_only=True)
class GenerationMetrics:
    """Metrics of answers that the model generates greedily in an evaluation, one for each sample."""

    names: tuple[str, ...]
    """Names of the metrics."""
    get_prompt: Callable[[Any], EncodedPrompt]
    """Sample -> its prompt; the images may be `ImageEntry`s."""
    score: Callable[[Any, str], Mapping[str, float]]
    """(sample, text of the answer) -> name -> score. A metric is the mean over the samples."""
    tokenizer: Any
    vision_processor: VisionProcessor | None = None
    """Processor of the prompts' images; None for a text-only model."""
    max_new_tokens: int = 64
    """Limit of tokens per answer."""
    max_samples: int | None = None
    """Generate for the first N samples only; None: for all."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks and messages before a run starts. Subclass it, and return yours from `Task.checks`."""

    parse_record: Callable[[dict[str, Any]], Any] | None = None
    """Parses one record for `dstrain data check`; raises BadRecord. None: the task has no format."""

    def required_keys(self) -> None:
        """Raise UsageError where the recipe lacks a key. Called first, without torch."""

    def run(self) -> None:
        """Raise UsageError for whatever can be found wrong before any process group starts."""

    def device(self) -> None:
        """Raise UsageError where this machine cannot run the model. Not called where only tokens are prepared."""

    def warnings(self) -> Sequence[str]:
        """Return a warning for each setting that is allowed but may surprise the user."""
        return ()

    def info_messages(self) -> Sequence[str]:
        """Return a sentence for each fact worth knowing when a run starts."""
        return ()

    def baselines(self, examples: Samples) -> Mapping[str, float]:
        """Return metrics of simple rules on the examples, to compare the model's metrics with."""
        return {}


@dataclass(frozen=True)
class Export:
    """Export of the trained model, and loading of an export. Return a subclass from `Task.export`."""

    task: Task
    modules_to_save: tuple[str, ...] = ()
    """New parts of the model, trained and saved in full where LoRA freezes the rest (peft's name)."""

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return what the reloaded model has to reproduce on a probe batch."""
        return self.task.loss(model, batch).total

    def make_probes(self, examples: Sequence[Any]) -> list[Batch]:
        """Return a batch of each example, for `outputs`."""
        return [self.task.collate([example]) for example in examples]

    def recipe(self, merged: bool) -> RunConfig:
        """Return the recipe to write next to the exported model.

        The exported folder replaces `model.path` where it holds the whole model. `merged`: the run
        had adapters, and they are part of the weights now.
        """
        return self.task.recipe

    def save_extras(self, folder: Path) -> None:
        """Write what the model needs besides its weights: a tokenizer, a processor."""

    def reload(self, folder: Path) -> torch.nn.Module:
        """Load the model of an exported folder, by transformers where its class is transformers'."""
        from dstrain.models.weights.module_file import load_module

        model: Any = self.task.build_model()
        if hasattr(model, "save_pretrained"):
            return cast("torch.nn.Module", type(model).from_pretrained(str(folder)))
        load_module(model, folder)
        return cast("torch.nn.Module", model)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Model, data and loss of a training run. A frozen dataclass whose fields are the task's options.

    A task is one file:

        @dataclass(frozen=True, kw_only=True)
        class Halves(Task):
            weight: float = 1.0
            '''What the option does, with its unit. This string is its help text.'''

            def examples(self, split): ...       # any sequence of samples
            def collate(self, examples): ...     # samples -> Batch
            def build_model(self): ...           # -> torch module
            def loss(self, model, batch): ...    # -> Loss, a sum
    """

    metric_names: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics of `loss` and of generated answers, so that eval.metric can be checked before the run."""

    learning_rate: ClassVar[float] = 1.0e-5
    """Peak learning rate where the recipe sets no optim.lr; with `model.lora` ten times this."""

    data_keys: ClassVar[tuple[str, ...]] = ()
    """The DATA_KEYS that `examples` applies. A recipe that sets another is refused."""

    needs_images: ClassVar[bool] = False
    """True where records are expected to have images: a file without any gets a warning."""

    recipe: RunConfig = field(default_factory=RunConfig, repr=False)
    """The recipe that the task was made for; not an option."""

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Any] | None:
        """Return samples by index, or None where there is no held-out data.

        Runs on every process before any process group starts. A `dstrain.data.dataset.Dataset`
        may also give sources, weights and lengths. Raises DataError for data that cannot be used.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> Batch:
        """Return one micro-batch on the host, with its weight."""

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """Return the model with its weights. Collective under ZeRO-3."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        """Return sums over the batch. Runs the model's forward pass once, on every rank.

        `model`: what `build_model` returned; adapters are in its layers, without peft's wrapper around it.
        """

    @property
    def loss_inputs(self) -> LossInputs:
        """Values computed before the loss: outputs of a reference, statistics of a whole step."""
        return LossInputs()

    @property
    def checks(self) -> Checks:
        """Checks and messages before a run starts."""
        return Checks()

    @property
    def export(self) -> Export:
        """Export of the trained model, and loading of an export."""
        return Export(self)


def has_dropout_disabled(task: Task) -> bool:
    """Return the task's option `disable_dropout`, False where it has none."""
    return bool(getattr(task, "disable_dropout", False))


def load_split(task: Task, split: Split) -> Dataset | None:
    """Return `load_dataset` with what the task's reward models read. Raises RecipeError, DataError."""
    dataset = load_dataset(task, split)
    if dataset is not None:
        for scorer in task.loss_inputs.scorers:
            dataset = scorer.prepare(dataset, split)
    return dataset


def load_dataset(task: Task, split: Split) -> Dataset | None:
    """Return the task's examples of a split as a `Dataset`, None where there are none."""
    examples = task.examples(split)
    if examples is None:
        return None
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        kind = type(examples).__name__
        raise TaskError(
            f"task {task.recipe.task}: examples('{split}') returned a {kind}; return a list or another sequence"
        )
    return as_dataset(examples)
