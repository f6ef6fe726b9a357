"""The interface of a task, and the options that are its fields."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dstrain.batch import PADDED, Batch, PackingMode
from dstrain.config.schema import DatasetConfig, LoraConfig, ModelConfig, RunConfig
from dstrain.data.dataset import Dataset, Samples, SequenceDataset, of_one_sequence
from dstrain.errors import Fault, RecipeError, TaskError, suggest_name
from dstrain.tasks.common.generation import Prompts

if TYPE_CHECKING:
    import torch

    from dstrain.data.sources.base import Source
    from dstrain.tasks.common.model_source import ModelSource


Split = Literal["train", "eval"]
DATA_KEYS = ("columns", "eval_fraction", "eval_group", "max_samples", "on_error", "weight")
"""Keys of `data`, and of an item of data.train, that say which records of the files are used."""
ReferenceKind = Literal["none", "model", "adapter", "cached"]
"""No reference; a frozen copy in memory; the model with LoRA switched off; precomputed outputs."""
Outputs = Mapping[str, "torch.Tensor"]
Sums = Mapping[str, "torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]"]
"""Name -> sum over the batch, or (sum, weight) where the weight is not the batch's."""
AnswerMetric = Callable[[str, Sequence[str]], float]
"""(answer, accepted answers) -> score."""
EXPORT_RECIPE = "dstrain_recipe.yaml"
"""File of an exported folder: the recipe with task and options."""


@dataclass(frozen=True)
class Loss:
    """The sums of one forward pass. dstrain divides each by its weight over the whole step."""

    total: torch.Tensor
    """Scalar, differentiable: the sum over the batch, not the mean."""
    metrics: Sums = field(default_factory=dict)
    """Name -> sum over the batch, or (sum, its own weight).

    A name that begins with an underscore is not reported, but `Task.finish_metrics` reads it."""


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
    every batch. `loss` finds the tensors in its batch. Of outputs that are cached, an example has a number where they
    are (B,), and the rows of its targets, (targets, ...), where they are (B, K, ...) as the batch's `loss_mask` (B, K)."""
    key: Mapping[str, Any] = field(default_factory=dict)
    """What the outputs depend on besides data, model and precision. It is part of the key of cached outputs."""


@dataclass(frozen=True, kw_only=True)
class Reference(FrozenModel):
    """The model that a loss compares the trained one with."""

    kind: ReferenceKind = "none"
    """Source of its outputs."""
    recipe_key: str | None = None
    """Recipe key of another model; None: the reference is the run's model before training."""


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


MIN_HELD_OUT = 10
"""Held-out samples below which a run warns that a metric of them says little."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Checks and messages before a run starts. Subclass it, and return yours from `Task.checks`."""

    parse_record: Callable[[dict[str, Any]], Any] | None = None
    """Parses one record for `dstrain data check`; raises BadRecord. None: the task has no format."""

    def required_keys(self) -> None:
        """Raise UsageError where the recipe lacks a key. Called first, without torch."""

    def run(self) -> None:
        """Raise UsageError for whatever can be found wrong before any process group starts."""

    def reference(self) -> None:
        """Raise UsageError where the model that the reference is loaded from is missing."""

    def device(self) -> None:
        """Raise UsageError where this machine cannot run the model. Not called where only tokens are prepared."""

    def warnings(self) -> Sequence[str]:
        """Return a warning for each setting that is allowed but may surprise the user."""
        return ()

    def info_messages(self) -> Sequence[str]:
        """Return a sentence for each fact worth knowing when a run starts."""
        return ()

    def data_warnings(self, train: Samples, held_out: Samples | None) -> Sequence[str]:
        """Return a warning for data from which little can be learnt, or by which little can be told."""
        if held_out is None or len(held_out) >= MIN_HELD_OUT:
            return ()
        count = f"{len(held_out)} sample{'s' * (len(held_out) != 1)}"
        return [
            f"the held-out data have {count}: metrics of so few say little, and the best checkpoint is chosen by them; hold "
            "out more with data.eval or data.eval_fraction"
        ]

    def newly_initialized(self) -> Sequence[str]:
        """Return the weights that the model's files lack, after `run`."""
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
        from dstrain.models.weights import load_module

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
    default_lora: ClassVar[LoraConfig | None] = None
    """Adapters where the recipe does not write `model.lora`; the value null there trains the weights."""

    answer_metrics: ClassVar[Mapping[str, AnswerMetric]] = {}
    """Metrics of generated answers that `eval.generate.metrics` may name, of a task on text."""

    default_answer_metrics: ClassVar[tuple[str, ...]] = ()
    """The answer_metrics where the recipe names none; a task with some generates answers in each evaluation."""

    data_keys: ClassVar[tuple[str, ...]] = ()
    """The DATA_KEYS that `examples` applies. A recipe that sets another is refused."""

    needs_vision: ClassVar[bool] = False
    """True where the model has to take images."""

    path_options: ClassVar[tuple[str, ...]] = ()
    """Options that name a model's folder or Hub id, `safety.harmless_rm` in a block: looked up next to the recipe too,
    and not downloaded where only a folder of somebody else names it."""

    packs_batches: ClassVar[bool] = False
    """True where `collate` can pack the rows, and `loss` reads them through functions that know packed batches.

    Where the recipe leaves it open, rows are packed only if the class itself says so: a class that inherits the value
    may have methods that expect padded rows."""

    has_pairs: ClassVar[bool] = False
    """True where the rows of a sample begin with the same tokens."""

    names_model: ClassVar[bool] = False
    """True where `model.path` or `model.config` names a transformers model that the task trains."""

    is_planned: ClassVar[bool] = False
    """True where the model is one of transformers with a language-model or score head, as `dstrain plan` computes it."""

    recipe: RunConfig = field(default_factory=RunConfig, repr=False)
    """The recipe that the task was made for; not an option."""

    @classmethod
    def select_class(cls, options: Mapping[str, Any]) -> type[Task]:
        """Return the class that is made with these options: this one, unless one of them has a class of its own."""
        return cls

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

    def finish_metrics(self, sums: Mapping[str, tuple[float, float]]) -> Mapping[str, float]:
        """Return metrics that are no mean over samples, such as an F1, from the sums of the metrics of `loss`.

        `sums`: name -> (sum, weight) over all processes and batches of a row; what has no weight is absent. A result of
        the same name takes the place of the mean.
        """
        return {}

    def sequence_parallel_unsupported_reason(self, size: int) -> str | None:
        """Return why `size` processes cannot compute a micro-batch together (parallel.sequence), or None."""
        return f"task {self.recipe.task} has no packed batches, whose tokens processes could share"

    @property
    def encodes_records(self) -> bool:
        """True where examples are encoded once and cached, which the first process of a host does for the others."""
        return False

    def open_source(self, item: DatasetConfig) -> Source:
        """Return the records of a file or of a dataset of the Hub."""
        from dstrain.data.sources.open import open_source

        return open_source(item, self.recipe.data.columns)

    def wrap_source(self, source: Source, item: DatasetConfig) -> Source:
        """Return the source as the task reads it; training items are `TrainDatasetConfig`."""
        return source

    def digest_records(self, items: Sequence[DatasetConfig]) -> str | None:
        """Return a digest of the records of these files; None: the task reads files in its own way."""
        return None

    @property
    def describes_records(self) -> bool:
        """True where records have a readable form beside their tokens."""
        return False

    def show_records(self, limit: int) -> Iterator[str]:
        """Yield the first training records in their readable form, for `dstrain data show`."""
        yield from ()

    @property
    def model_source(self) -> ModelSource | None:
        """The transformers model that the recipe names; None: the task makes its model in its own way."""
        return None

    @property
    def prompts(self) -> Prompts | None:
        """What the model is asked outside of training; None: it reads no text."""
        return None

    @property
    def has_own_tokenizer(self) -> bool:
        """True where a task on text, in a user's file, makes the tokenizer in its own way."""
        return False

    @property
    def disables_dropout(self) -> bool:
        """The option `disable_dropout`; False for a task without it."""
        return bool(getattr(self, "disable_dropout", False))

    def enable_packing(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare a model for packed batches, where the task has them. Returns it."""
        return model

    @property
    def loads_own_model(self) -> bool:
        """True where `build_model` makes the model in its own way, not as transformers does."""
        return True

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


def check_sequence_parallel(task: Task) -> None:
    """Raise RecipeError where parallel.sequence is above 1, and the task or its model cannot be shared."""
    size = task.recipe.parallel.sequence
    if size > 1 and (reason := task.sequence_parallel_unsupported_reason(size)):
        raise RecipeError(Fault("parallel.sequence", f"is {size}, but {reason}", "write 1"))


def select_subclass(task: type[Task], option: str, target: str) -> type[Task]:
    """Return the subclass `target`, MODULE:CLASS, of a packaged task, for an option that only the subclass has.

    A user's class must derive from the subclass itself, or its own code would not run. Raises TaskError.
    """
    module, _, name = target.partition(":")  # a name, since the module imports the packaged task's
    subclass: type[Task] = getattr(importlib.import_module(module), name)
    if issubclass(task, subclass):
        return task
    if task not in subclass.__bases__:
        problem = f"is set, but {task.__name__} derives from a task without it"
        raise TaskError(Fault(f"options.{option}", problem, f"derive it from {module}.{name}"))
    return subclass


def load_split(task: Task, split: Split) -> Dataset | None:
    """Return the task's examples of a split, with what its reward models read; None where there are none.

    Raises RecipeError, DataError.
    """
    examples = task.examples(split)
    if examples is None:
        return None
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        kind = type(examples).__name__
        raise TaskError(
            f"task {task.recipe.task}: examples('{split}') returned a {kind}; return a list or another sequence"
        )
    dataset = as_dataset(examples)
    for scorer in task.loss_inputs.scorers:
        dataset = scorer.prepare(dataset, split)
    return dataset


def as_dataset(samples: Samples) -> Dataset:
    """Return what `Task.examples` gave as a `Dataset`; attributes that a plain sequence has count.

    A method `lengths` returns the tokens of samples of one sequence each: (N,) ids -> (N,).
    """
    if isinstance(samples, Dataset):
        return samples
    lengths, report = getattr(samples, "lengths", None), getattr(samples, "report", None)
    sequence_lengths = getattr(samples, "sequence_lengths", None)
    if not callable(sequence_lengths):
        sequence_lengths = of_one_sequence(lengths) if callable(lengths) else None
    return SequenceDataset(
        samples,
        sizes=tuple(getattr(samples, "sizes", (len(samples),))),
        weights=getattr(samples, "weights", None),
        sequence_lengths=sequence_lengths,
        report=report if isinstance(report, Mapping) else None,  # a TokenStore has another kind
    )


@dataclass(frozen=True)
class Option:
    """Option of a task, for help texts."""

    name: str
    type: str
    default: Any
    help: str
    nested: tuple[Option, ...] = ()
    """Options of a block, where the option is one: `options: {safety: {delta: 5}}`."""


def get_option_fields(task: type[Task]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a task that are options: all but those of `Task` itself."""
    inherited = {field.name for field in dataclasses.fields(Task)}
    return [field for field in dataclasses.fields(task) if field.name not in inherited]


def task_options(task: type[Task]) -> list[Option]:
    """Return the task's options with the strings under its fields as help."""
    return _describe_options(task, get_option_fields(task))


def _describe_options(owner: type, fields: Sequence[dataclasses.Field[Any]]) -> list[Option]:
    helps: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        if dataclasses.is_dataclass(cls) and cls is not Task:
            helps.update(_field_docstrings(cls))
    types = option_types(owner)
    described = []
    for option in fields:
        name = option.type if isinstance(option.type, str) else getattr(option.type, "__name__", str(option.type))
        default = None if option.default is dataclasses.MISSING else option.default
        if option.default_factory is not dataclasses.MISSING:  # a block of options with their own defaults
            default = {}
        block = find_block(types[option.name])
        nested = () if block is None else tuple(_describe_options(block, dataclasses.fields(block)))
        described.append(Option(option.name, name, default, helps.get(option.name, ""), nested))
    return described


def option_types(owner: type) -> dict[str, Any]:
    """Return the evaluated annotation of each option of a task, or of a block of options."""
    types: dict[str, Any] = {}
    for cls in reversed(owner.__mro__):
        if dataclasses.is_dataclass(cls) and cls is not Task:
            types.update(inspect.get_annotations(cls, eval_str=True))
    return types


def find_block(annotation: Any) -> Any:
    """Return the dataclass of an option that is a block of options, or None where it may be left out; else None."""
    return next((one for one in (annotation, *get_args(annotation)) if dataclasses.is_dataclass(one)), None)


@cache  # the words of every guide are looked up in all tasks, and parsing their source takes a second
def _field_docstrings(cls: type) -> dict[str, str]:
    """Return the string literal under each field, by the field's name."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[statement.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def validate_options(task: type[Task], recipe: RunConfig) -> dict[str, Any]:
    """Return the recipe's options, each of its field's type. Raises TaskError with every fault."""
    faults: list[Fault] = []
    fields = _OptionFields("options", f"task {recipe.task}", [field.name for field in get_option_fields(task)], faults)
    values = fields.validate(option_types(task), recipe.options)
    if faults:
        raise TaskError(faults)
    return values


@dataclass(frozen=True)
class _OptionFields:
    """Fields of a task or of a block of options, and the faults found in their values."""

    place: str
    """Dotted key of the block."""
    owner: str
    names: Sequence[str]
    faults: list[Fault]

    def validate(self, types: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values without faults, each of its type; add a fault for each of the others."""
        values = {}
        for name, value in given.items():
            if name not in self.names:
                near = suggest_name(str(name), self.names)
                self.faults.append(Fault(f"{self.place}.{name}", f"is not an option of {self.owner}", near))
                continue
            block = find_block(types[name])
            if block is not None and isinstance(value, Mapping):
                values[name] = self._read_block(name, block, value)
            elif (problem := _check_value(types[name], value, values, name)) is not None:
                fix = f"write {name}: {{…}}" if block is not None else "correct it"
                self.faults.append(Fault(f"{self.place}.{name}", f"is {value!r}, but {problem}", fix))
        return values

    def _read_block(self, name: str, block: Any, given: Mapping[str, Any]) -> Any:
        """Return the block as its dataclass, None if it has a fault."""
        place, known = f"{self.place}.{name}", [field.name for field in dataclasses.fields(block)]
        before = len(self.faults)
        values = _OptionFields(place, place, known, self.faults).validate(option_types(block), given)
        if len(self.faults) > before:
            return None
        try:
            return block(**values)
        except (TypeError, ValueError) as error:
            self.faults.append(Fault(place, str(error), ""))
            return None


def _check_value(annotation: Any, value: Any, values: dict[str, Any], name: str) -> str | None:
    """Put the value of its type into `values`; return what is wrong with it, None if nothing."""
    if find_block(annotation) is not None:
        if value is None and type(None) in get_args(annotation):
            values[name] = None
            return None
        return "input should be a block of options"
    try:
        read = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        problem = str(error.errors()[0]["msg"])
        return problem[0].lower() + problem[1:]
    if isinstance(value, bool) and isinstance(read, (int, float)) and not isinstance(read, bool):
        return "input should be a number"
    values[name] = read
    return None
