"""The recipe's one strict schema. The string under a field is its help text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from dstrain.config.field_types import EnvVar, Fraction, NonNegativeFloat, PositiveInt, SplitName
from dstrain.config.model_section import LoraConfig, ModelConfig, ProcessorConfig, Section, TokenizerConfig

__all__ = ["LoraConfig", "ModelConfig", "ProcessorConfig", "RunConfig", "Section", "TokenizerConfig"]


class DatasetConfig(Section):
    default_split: ClassVar[str] = "test"

    path: Annotated[str, Field(min_length=1)]
    """A jsonl, json or parquet file, or a dataset on the hub: org/name."""
    split: SplitName | None = None
    """Split of a dataset on the hub. Empty: test; in data.train: train."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Configuration of a dataset on the hub, where it has several."""


class TrainDatasetConfig(DatasetConfig):
    default_split: ClassVar[str] = "train"

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How many times each record is seen per epoch; 0.5 shows one half, the next epoch the other."""


def _to_train_datasets(value: Any) -> Any:
    """`a.jsonl` -> [{path: a.jsonl}]; lists may mix both forms."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, dict, TrainDatasetConfig)) for item in values):
        raise ValueError("must be a file, a hub name, or a list of them and of {path, split, name, weight}")
    return [{"path": item} if isinstance(item, str) else item for item in values]


def _to_dataset(value: Any) -> Any:
    """`a.jsonl` -> {path: a.jsonl}."""
    if value is not None and not isinstance(value, (str, dict, DatasetConfig)):
        raise ValueError("must be a file, a hub name, or {path, split, name}")
    return {"path": value} if isinstance(value, str) else value


class DataConfig(Section):
    train: Annotated[list[TrainDatasetConfig], BeforeValidator(_to_train_datasets)] = []
    """A file, a dataset on the hub (org/name), or a list of {path, split, name, weight}."""
    eval: Annotated[DatasetConfig | None, BeforeValidator(_to_dataset)] = None
    """Held-out file, dataset on the hub, or {path, split, name}."""
    eval_fraction: Fraction = 0.0
    """Instead of `eval`: this share of the training records is held out, chosen by the seed."""
    max_length: Annotated[PositiveInt, Field(ge=2)] = 1024
    """Tokens per sequence. To fit, older turns are cut from the left, then answers at their end; the last user turn stays."""
    max_prompt_length: PositiveInt | None = None
    """Tokens of the prompt, cut from the left, of its last user turn too."""
    max_samples: PositiveInt | None = None
    """Use the first so many records of each file."""
    columns: dict[str, str] = {}
    """Names in the file -> names the format knows."""
    on_error: Literal["skip", "fail"] | None = None
    """Bad records: skip them with a count, or fail at the first. Empty: fail above 1 %."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 4
    """Threads per process that read and collate ahead; 0: none."""
    prefetch: PositiveInt = 2
    """Steps read ahead."""
    pin: bool = True
    """Page-locked host memory, where there is a GPU."""


class BatchConfig(Section):
    total: PositiveInt | None = None
    """Samples per optimizer step over all processes."""
    micro: PositiveInt | None = None
    """Samples per forward pass and process."""
    accumulate: PositiveInt | None = None
    """Forward passes per optimizer step and process."""
    tokens_per_micro: PositiveInt | None = None
    """Pack micro-batches by tokens instead of samples."""
    on_oom: Literal["stop", "shrink"] = "stop"
    """What to do when a micro-batch does not fit the memory."""


class GroupConfig(Section):
    lr: NonNegativeFloat | None = None
    """Peak learning rate of this group; 0 freezes it."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this group."""
    muon: bool = True
    """With optim.name: muon, false leaves the hidden matrices of this group to AdamW."""


OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {"lion": {"betas": (0.9, 0.99)}, "muon": {"clip": 0.0}}
"""Lion's betas are its paper's (arXiv 2302.06675, section 5); Muon's steps have one length, whatever the gradient's is."""


class OptimConfig(Section):
    name: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = "adamw"
    """adamw (CPUAdam where the JSON offloads, fused on a GPU), sgd, lion, muon (hidden matrices; AdamW for the rest), or adafactor (stage 0 only)."""
    lr: NonNegativeFloat | None = None
    """Peak learning rate; empty: the task's own (`dstrain tasks NAME`), ten times that with model.lora. Muon's is AdamW's; Lion's is 3 to 10 times smaller; Adafactor's is relative to the size of the weights."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the first and second moment; of Lion's two averages, where empty means 0.9 and 0.99."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """Adam's epsilon, also for what Muon leaves to AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; biases and norms are left out."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; 0: never clipped, which is Muon's default."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warmup."""
    warmup: NonNegativeFloat = 0.03
    """Below 1: share of the steps. From 1 on: steps."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by (processes / scale_lr_base), or by its root."""
    scale_lr_base: PositiveInt = 1
    """Processes for which lr was chosen."""
    groups: dict[str, GroupConfig] = {}
    """Name or glob, or vision, projector, language -> its own lr or weight_decay: {"*.embed_tokens": {lr: 1e-6}}."""

    @property
    def peak_lr(self) -> float:
        """`lr` as settled. Raises ValueError where it is not: `make_task` and `resolve_wish` settle it."""
        if self.lr is None:
            raise ValueError(
                "optim.lr is not settled; take the recipe of a task, which has its own where none is named"
            )
        return self.lr

    @model_validator(mode="before")
    @classmethod
    def _apply_optimizer_defaults(cls, values: Any) -> Any:
        """An optimizer's own defaults, where they are not AdamW's."""
        name = values.get("name") if isinstance(values, dict) else None
        return (
            {**OPTIMIZER_DEFAULTS[name], **values} if isinstance(name, str) and name in OPTIMIZER_DEFAULTS else values
        )


class WandbConfig(Section):
    project: str
    """Project the run appears in."""
    name: str | None = None
    """Name of the run; empty: the run folder's."""
    mode: Literal["online", "offline"] = "online"
    """offline writes files that `wandb sync` uploads later. WANDB_MODE=offline or disabled overrides online."""


class LogConfig(Section):
    every: PositiveInt = 10
    """Steps between two rows."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: WandbConfig | None = None
    """Send rows to Weights & Biases, from rank 0."""


class EvalConfig(Section):
    every: PositiveInt | Literal["epoch"] = 200
    """Steps between two evaluations, or the word epoch."""
    metric: str = "loss"
    """The metric `best` goes by."""
    best: Literal["min", "max"] = "min"
    """Whether the metric is better small or large."""


class SaveConfig(Section):
    every: PositiveInt | Literal["epoch"] = 200
    """Steps between two checkpoints, or the word epoch; one is always written at the end."""
    keep: PositiveInt | None = 3
    """Checkpoints kept, beside the best; null keeps all."""
    keep_every: PositiveInt | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    background: bool = False
    """Write behind training, from a copy in host memory; training waits for the copy alone. Not where state lies on a disk."""
    prune_when_full: bool = False
    """Where the disk cannot hold one more, delete older checkpoints first; never the newest whole one."""


class ProfileConfig(Section):
    steps: tuple[PositiveInt, PositiveInt]
    """First and last step to profile, counted from 1 as in metrics.jsonl."""
    memory: bool = False
    """Record allocations too."""


class SlurmConfig(Section):
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account."""
    time: str | None = None
    """Time limit, as sbatch takes it."""
    setup: list[str] = []
    """Shell lines that run before the training."""


class LaunchConfig(Section):
    env: list[EnvVar] = []
    """Environment variables that every rank gets, on every host: NAME as it is where the launch begins, or NAME=value."""
    grace_seconds: NonNegativeFloat | None = 30.0
    """What the scheduler leaves between SIGTERM and SIGKILL; a checkpoint that takes longer is warned of. null: not known."""
    heartbeat_timeout_seconds: Annotated[float, Field(ge=3, le=1e6)] = 30.0
    """If a host sends no message for this long, the launch is ended on all hosts."""
    slurm: SlurmConfig = SlurmConfig()
    """For the Slurm launcher."""

    @model_validator(mode="before")
    @classmethod
    def _accept_old_name(cls, values: Any) -> Any:
        """Read `silence_seconds`, the key's name up to version 0.1, in recipes and run folders."""
        old, new = "silence_seconds", "heartbeat_timeout_seconds"
        if isinstance(values, dict) and old in values and new not in values:
            return {new if key == old else key: value for key, value in values.items()}
        return values


class RunConfig(Section):
    """A whole recipe."""

    task: str = ""
    """A packaged task (`dstrain tasks`), a file path, or a dotted module."""
    options: dict[str, Any] = {}
    """The task's own options (`dstrain tasks NAME` documents them)."""
    model: ModelConfig = ModelConfig()
    """The model and what of it is trained."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 if the GPU has it, else fp16; fp32 on a CPU."""
    data: DataConfig = DataConfig()
    """Where samples come from."""
    ds_config: str = "zero2"
    """A name in ds_configs, or the path of a DeepSpeed JSON."""
    batch: BatchConfig = BatchConfig()
    """Any two of total, micro, accumulate."""
    optim: OptimConfig = OptimConfig()
    """How the weights learn."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Instead of `steps`: passes over the data. With neither: 1."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Order of the data, initial weights, dropout."""
    deterministic: bool = False
    """Bit-equal results on a GPU too, at a price in speed."""
    compile: bool = False
    """torch.compile the model."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step with an inf or nan is always left out; stop ends the run after 3 in a row."""
    timeout_minutes: Annotated[float, Field(ge=0.1, le=1e6)] = 10.0
    """How long a process waits for a silent one."""
    log: LogConfig = LogConfig()
    """Where numbers go."""
    eval: EvalConfig = EvalConfig()
    """When held-out data is looked at."""
    save: SaveConfig = SaveConfig()
    """When checkpoints are written and which are kept."""
    profile: ProfileConfig | None = None
    """Steps to look at closely: a trace, DeepSpeed's flops table, the memory."""
    launch: LaunchConfig = LaunchConfig()
    """What launchers need to know."""
