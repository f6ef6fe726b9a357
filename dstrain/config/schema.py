"""Recipe schema: the keys with their types, and rules across keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    field_validator,
    model_validator,
)

from dstrain.errors import SECRET_NAME, URL_PASSWORD

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _check_split_name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\w+(\.\w+)*", value, re.ASCII):
        raise ValueError("a split is one name such as train; data.max_samples limits its records")
    return value


SplitName = Annotated[str, BeforeValidator(_check_split_name)]


ATTN_IMPLEMENTATIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Values of model.attn_implementation, besides kernels on the Hub."""


def _check_attn_implementation(value: str) -> str:
    if value not in ATTN_IMPLEMENTATIONS and not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?", value, re.ASCII):
        known = ", ".join(ATTN_IMPLEMENTATIONS)
        raise ValueError(f"must be one of {known}, or a kernel on the Hub such as kernels-community/flash-attn2")
    return value


AttnImplementation = Annotated[str, AfterValidator(_check_attn_implementation)]


def _check_share_of_layers(value: bool | float) -> bool | float:
    if not isinstance(value, bool) and not 0 < value < 1:
        raise ValueError("must be true, false, or the share of the layers, between 0 and 1")
    return value


ShareOfLayers = Annotated[bool | float, AfterValidator(_check_share_of_layers)]
"""True for all, false for none."""


def _check_tile_tokens(value: bool | int | str) -> bool | int | str:
    if not isinstance(value, (bool, str)) and value < MIN_TILE_TOKENS:
        raise ValueError(f"must be auto, true, false, or the tokens of a tile, at least {MIN_TILE_TOKENS}")
    return value


MIN_TILE_TOKENS = 16
"""Of model.tiled_mlp: a smaller number was meant as a number of tiles."""
TiledMlp = Annotated[bool | StrictInt | Literal["auto"], AfterValidator(_check_tile_tokens)]


_RECIPES_ARE_SAVED = "and recipes are saved; write the name alone, and set the variable where you launch"


def _check_env_var(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(=[^\0]*)?", value, re.ASCII):
        raise ValueError("must be the name of an environment variable, or NAME=value")
    name, given, content = value.partition("=")
    if given and URL_PASSWORD.search(content):
        raise ValueError(f"{name} holds a URL with a password, {_RECIPES_ARE_SAVED}")
    if given and SECRET_NAME.search(name):
        raise ValueError(f"{name} looks like a secret, {_RECIPES_ARE_SAVED}")
    return value


EnvVar = Annotated[str, AfterValidator(_check_env_var)]


def hide_secret(value: Any) -> Any:
    """Return the value as a message may show it: `NAME=...` for a secret."""
    name, given, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
    return f"{name}=..." if given and (SECRET_NAME.search(name) or URL_PASSWORD.search(value)) else value


def check_limits(options: Any, *names: str, least: float = 0, below: float = math.inf) -> None:
    """Raise ValueError for an option, an attribute with one of the names, under `least` or not below `below`.

    None, an option that is not set, is within any limits.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not least <= value < below:
            limits = f"at least {least:g}" + ("" if below == math.inf else f" and below {below:g}")
            raise ValueError(f"{name} is {value:g}, but it must be {limits}")


class Section(BaseModel):
    """Frozen block of the recipe that rejects unknown keys. The string under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class LoraConfig(Section):
    """LoRA adapters."""

    rank: PositiveInt = 16
    """Rank of the two adapter matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """Names of the modules that get an adapter."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""
    use_rslora: bool = False
    """Rank-stabilized LoRA: the update is multiplied by alpha / sqrt(rank) (arXiv 2312.03732)."""
    create_new_adapter: bool = True
    """If `path` is an adapter folder: true merges its adapter into the base and trains a new one; false trains its adapter on, with the folder's rank, alpha and targets."""


class TokenizerConfig(Section):
    """A tokenizer to train."""

    train: Literal["bpe"] = "bpe"
    """bpe: byte-level byte-pair encoding, trained on data.train and saved in the run folder."""
    vocab_size: PositiveInt
    """Vocabulary size, special tokens included."""
    alphabet: Literal["bytes", "data"] = "bytes"
    """bytes: every text can be encoded; data: only the characters of the training texts, for small vocabularies."""


class ProcessorConfig(Section):
    """Settings of the processor of `path`, or of one built for the model's family."""

    max_pixels: PositiveInt | None = None
    """Reduce images to at most this many pixels, such as 589824 (768 x 768): processors of Qwen-VL, whose tokens grow with them. Exported with the processor; empty: its own limit."""
    normalize: Literal["data"] | None = None
    """data: normalize by mean and standard deviation per channel of the training images, with `config`; empty: by the family's values."""


def _to_template_time(value: Any) -> Any:
    """Return a time in ISO 8601, to the second."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be a time such as 2026-11-28T09:00:00") from None
    return time.isoformat(timespec="seconds") if isinstance(time, datetime) else value


class ModelConfig(Section):
    """The model, its tokenizer and processor, and the trained parameters."""

    path: str | None = None
    """Local folder or Hub id of a transformers model, or a run folder of dstrain: RUN (its best checkpoint), RUN@last or RUN@STEP, which is exported to RUN/exports once."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit of a Hub id in `path`; of its config, weights, tokenizer and processor. Empty: main."""
    config: dict[str, Any] | None = None
    """Instead of `path`: a transformers config (with `model_type`) to build a model from scratch."""
    tokenizer: str | TokenizerConfig | None = None
    """Folder or Hub id, or {train: bpe, vocab_size: N}. Empty: the tokenizer of `path`; with `config`, one trained on data.train with the config's vocab_size."""
    processor: str | ProcessorConfig | None = None
    """Folder or Hub id of a vision-language model's processor, or {max_pixels: N}. Empty: the processor of `path`; with `config`, one built for its family."""
    chat_template: str | None = None
    """Replaces the tokenizer's chat template: a Jinja template, the path of its file, or human_assistant ("Human: … Assistant: …", each answer followed by EOS)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as {enable_thinking: false}, in training, generation, scoring and chats. The exported template has them as defaults, which a server may override."""
    chat_template_time: Annotated[str | None, BeforeValidator(_to_template_time)] = None
    """Time for a chat template that asks for the present one (Llama 3.2, Granite), such as 2026-11-28T09:00:00. Empty: the time of the run's first start, which the run records for resume, evaluation and generation."""
    init: str | None = None
    """Initial weights: safetensors, a .pt file with or without "module." prefixes, or a run folder as in `path`, its adapters merged."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype in which the weights are loaded. Empty: float32; DeepSpeed then casts them to `precision`."""
    attn_implementation: AttnImplementation = "auto"
    """Attention implementation: auto (chosen by transformers), sdpa, eager, flash_attention_2, flash_attention_3, flex_attention, or a kernel on the Hub such as kernels-community/flash-attn2."""
    kernels: Literal["auto", "liger", "none"] = "auto"
    """Fused kernels for norms, rotary embeddings, gated MLPs, and residuals added before a norm. liger: liger-kernel's, on GPUs, with the extra [kernels], in every module whose values they reproduce; auto: liger if it is installed and can run; none: transformers' own operations."""
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of the weights."""
    quantize: Literal["nf4", "int8"] | None = None
    """Store the frozen linear layers in 4 bits (nf4: QLoRA, with double quantization) or 8 bits (int8); needs lora and the extra [quantize]; int8 also a ZeRO stage below 3."""
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = None
    """NEFTune: in training, add uniform noise to the token embeddings, at most this number / sqrt(tokens of the sequence x hidden size) (arXiv 2310.05914)."""
    freeze: list[str] = []
    """Parameters to freeze: names, prefixes of names or globs; of a vision-language model also vision, projector, language."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Mixture of experts: factor of the router's auxiliary loss. Empty: the factor in the model's config, if its output_router_logits is true."""
    gradient_checkpointing: ShareOfLayers = True
    """Recompute activations in the backward pass: less memory, about a third more compute. A share such as 0.5 does so in that share of the layers."""
    tiled_mlp: TiledMlp = "auto"
    """Run the MLPs of the decoder in tiles of tokens, so that only one tile's intermediate activations exist at a time. auto: tiles of 8,192 tokens in layers that recompute their activations, where tiles cost nothing; true: in all layers; a number: tokens of a tile, in all layers."""
    trust_remote_code: bool = False
    """Let transformers run Python code from the model's folder or repository."""


__all__ = ["LoraConfig", "ModelConfig", "ProcessorConfig", "RunConfig", "Section", "TokenizerConfig"]


def _check_columns(value: Any) -> Any:
    """Refuse `{a:b}`, which YAML reads as one key without a value."""
    for name in value if isinstance(value, dict) else ():
        if isinstance(name, str) and ":" in name and ": " not in name and value[name] is None:
            raise ValueError(
                f"has a column '{name}' without a value; write a blank after the colon, and quotes around --set's value"
            )
    return value


ColumnNames = Annotated[dict[str, str | None], BeforeValidator(_check_columns)]


class DatasetConfig(Section):
    """A data file or Hub dataset."""

    default_split: ClassVar[str] = "test"

    path: Annotated[str, Field(min_length=1)]
    """A jsonl, json or parquet file, a pattern of several (train-*.parquet), or a Hub dataset: org/name."""
    split: SplitName | None = None
    """Split of a Hub dataset. Empty: test; in data.train: train."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Configuration of a Hub dataset that has several."""
    columns: ColumnNames | None = None
    """Column names of this file -> names of the record format, in place of data.columns."""
    media_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder in which relative paths of images and documents are looked up. Empty: the file's own."""


class TrainDatasetConfig(DatasetConfig):
    """A training file or Hub dataset, with its weight in the mix."""

    default_split: ClassVar[str] = "train"

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often each record is used per epoch. 0.5: one half in one epoch, the other half in the next."""


def _to_train_datasets(value: Any) -> Any:
    """Return `a.jsonl` as [{path: a.jsonl}]; lists may mix both forms."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, dict, TrainDatasetConfig)) for item in values):
        raise ValueError(
            "must be a file, a Hub dataset, or a list of them and of {path, split, name, columns, media_dir, weight}"
        )
    return [{"path": item} if isinstance(item, str) else item for item in values]


def _to_dataset(value: Any) -> Any:
    """Return `a.jsonl` as {path: a.jsonl}."""
    if value is not None and not isinstance(value, (str, dict, DatasetConfig)):
        raise ValueError("must be a file, a Hub dataset, or {path, split, name, columns, media_dir}")
    return {"path": value} if isinstance(value, str) else value


class DataConfig(Section):
    """Training and held-out data."""

    train: Annotated[list[TrainDatasetConfig], BeforeValidator(_to_train_datasets)] = []
    """Training data: a file, a Hub dataset (org/name), or a list of {path, split, name, columns, media_dir, weight}."""
    eval: Annotated[DatasetConfig | None, BeforeValidator(_to_dataset)] = None
    """Held-out data: a file, a Hub dataset, or {path, split, name, columns, media_dir}."""
    eval_fraction: Fraction = 0.0
    """Alternative to `eval`: fraction of the training records to hold out, chosen by the seed."""
    eval_group: Annotated[str, Field(min_length=1)] | None = None
    """With eval_fraction: a column, such as a document's name; records with equal values stay on one side. Empty: records with equal prompts do."""
    max_length: Annotated[PositiveInt, Field(ge=2)] = 1024
    """Maximum tokens per sequence. Longer ones lose older turns, then the end of answers; the last user turn stays."""
    max_prompt_length: PositiveInt | None = None
    """Maximum tokens of the prompt; longer prompts are cut from the left, also within the last user turn."""
    max_samples: PositiveInt | None = None
    """Use only the first N records of each file."""
    columns: ColumnNames = {}
    """Column names in the file -> names of the record format; null leaves a column out."""
    rendered: bool | Literal["auto"] = "auto"
    """Texts that went through a chat template already (`<|im_start|>user ...`), which are taken as they stand. auto: where a prompt begins or ends as the template writes it, or a text alone contains its control tokens; true: all; false: none. Elsewhere a control token makes a record bad."""
    on_error: Literal["skip", "fail"] | None = None
    """Bad records: skip and count them, or fail at the first. Empty: skip up to 1 %."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 4
    """Threads per process that read and collate batches in advance; 0: none."""
    prefetch: PositiveInt = 2
    """Steps to load in advance."""
    pin: bool = True
    """Load batches into page-locked host memory if there is a GPU."""


class BatchConfig(Section):
    """Batch sizes."""

    total: PositiveInt | None = None
    """Samples per optimizer step over all processes."""
    micro: PositiveInt | None = None
    """Samples per forward pass and process. With tokens_per_micro it is an upper limit, and you may leave it out."""
    accumulate: PositiveInt | None = None
    """Forward passes per optimizer step and process. With tokens_per_micro it follows from the lengths of the samples."""
    tokens_per_micro: PositiveInt | None = None
    """Tokens per forward pass and process, padding included, instead of a number of samples; needs total. A longer sample is alone in its pass."""
    packing: bool | Literal["auto"] = "auto"
    """Put the sequences of a micro-batch into one row without padding. auto: do so if the model is known to compute the same; if not, the run says why."""
    prefix_sharing: bool | Literal["auto"] = "auto"
    """Compute the common beginning of the two answers of a pair once, instead of once for each; needs packing."""
    on_oom: Literal["stop", "shrink"] = "stop"
    """If a micro-batch does not fit into memory: stop ends with an error; shrink tries the longest batch before the first step, and halves the micro-batch until it fits. The total stays."""


class ParallelConfig(Section):
    """How processes share the work, besides ZeRO's partitions."""

    sequence: PositiveInt = 1
    """Number of processes that compute each micro-batch together, each a part of its tokens and of the attention heads (DeepSpeed-Ulysses, arXiv 2309.14509). Sequences may be that many times as long. It must divide the number of processes and of attention heads, and it needs packed batches. Each process still holds all token ids and images of a sample."""


class GroupConfig(Section):
    """Settings of one parameter group."""

    lr: NonNegativeFloat | None = None
    """Peak learning rate of this group; 0 freezes it."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this group."""
    muon: bool = True
    """With optim.name: muon; false: optimize the hidden matrices of this group with AdamW."""


OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {"lion": {"betas": (0.9, 0.99)}, "muon": {"clip": 0.0}}
"""Lion's betas are from its paper (arXiv 2302.06675, section 5). Muon needs no clipping: the norm of its update does
not depend on the gradient's."""


class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd", "lion", "adafactor", "muon", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """adamw (fused on a GPU; CPUAdam if the DeepSpeed JSON offloads the optimizer), sgd, lion, muon (hidden matrices; AdamW for the rest), adafactor (ZeRO stage 0 only), or with the extra [quantize] adamw_8bit and paged_adamw_8bit (moments in 8 bits; no offload)."""
    lr: NonNegativeFloat | None = None
    """Peak learning rate. Empty: the task's default (`dstrain tasks NAME`), times 10 with model.lora. For muon use the value you would use for adamw; for lion 3 to 10 times less; for adafactor it is relative to the scale of the weights."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the first and second moment; for Lion, of its two averages (default 0.9 and 0.99)."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """Adam's epsilon, also for the parameters that muon optimizes with AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to biases and norms."""
    clip: NonNegativeFloat = 1.0
    """Maximum norm of the gradient over all parameters; 0: no clipping, the default of muon."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning-rate schedule after the warmup."""
    warmup: NonNegativeFloat = 0.03
    """Below 1: fraction of all steps. 1 or more: number of steps."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by (batch.total / scale_lr_base), or by its square root."""
    scale_lr_base: PositiveInt = 256
    """Samples of a step that lr was tuned for."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None = None
    """LoRA+: the learning rate of the adapters' B matrices is this many times lr (arXiv 2402.12354)."""
    loraplus_lr_embedding: NonNegativeFloat = 1.0e-6
    """With loraplus_lr_ratio: learning rate of adapters on embeddings."""
    groups: dict[str, GroupConfig] = {}
    """Name, glob, or vision, projector, language -> lr and weight_decay of these parameters: {"*.embed_tokens": {lr: 1e-6}}."""

    @property
    def peak_lr(self) -> float:
        """Return `lr`. Raises ValueError while it is None: `fill_defaults` sets it."""
        if self.lr is None:
            raise ValueError("optim.lr is not set; use the recipe of a made task, which has the task's default")
        return self.lr

    @model_validator(mode="before")
    @classmethod
    def _apply_optimizer_defaults(cls, values: Any) -> Any:
        """Fill in an optimizer's own defaults where they differ from AdamW's."""
        name = values.get("name") if isinstance(values, dict) else None
        return (
            {**OPTIMIZER_DEFAULTS[name], **values} if isinstance(name, str) and name in OPTIMIZER_DEFAULTS else values
        )


class WandbConfig(Section):
    """Weights & Biases run."""

    project: str
    """Project of the run."""
    name: str | None = None
    """Name of the run. Empty: the name of the run folder."""
    mode: Literal["online", "offline"] = "online"
    """offline: write files that `wandb sync` uploads later. WANDB_MODE=offline or disabled overrides online."""


def _check_sink(value: str) -> str:
    module, mark, name = value.rpartition(":" if ".py:" in value else ".")
    is_path = all(part.isidentifier() for part in module.split("."))
    if not name.isidentifier() or not (module.endswith(".py") if mark == ":" else is_path):
        raise ValueError("must be module.Class, or FILE.py:Class")
    return value


Sink = Annotated[str, AfterValidator(_check_sink)]


class LogConfig(Section):
    """Logging of metrics."""

    every: PositiveInt = 10
    """Steps between two rows of metrics."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    memory: bool = False
    """Show memory in the lines of the console; metrics.jsonl has it in any case."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases, from rank 0."""
    sinks: list[Sink] = []
    """Further receivers of rows and events, on rank 0: classes by their import path, such as dstrain.report.sinks.MLflowSink, or FILE.py:Class; a module may be next to the recipe."""


class GenerateConfig(Section):
    """Answers that the model generates in an evaluation, greedily, one for each held-out sample."""

    samples: PositiveInt | None = None
    """Generate answers for the first N held-out samples only. Empty: for all."""
    max_new_tokens: PositiveInt | None = None
    """Largest number of tokens of an answer. Empty: 256; 32 for docqa, 24 for temporal."""
    metrics: list[str] | None = None
    """Metrics that compare the answers with the answers of the data: exact_match, relaxed_number_match, anls. Empty: all of them for docqa, pattern_accuracy for temporal, none for other tasks."""
    reward_model: Annotated[str, Field(min_length=1)] | None = None
    """Folder of an exported reward model that scores the answers. reward is their mean score; win_rate is how often an answer scores higher than the answer of the data. The reward model is in memory next to the model."""


LOWER_IS_BETTER = ("loss", "perplexity", "rmsd", "mae", "kl", "error")
"""Ends of the names of metrics of which less is better."""


class EvalConfig(Section):
    """Evaluation on held-out data."""

    every: PositiveInt | Literal["epoch"] = 200
    """Steps between two evaluations, or epoch: at the end of each epoch."""
    metric: str = "loss"
    """Metric that selects the best checkpoint."""
    best: Literal["min", "max"] = "min"
    """min: lower values of the metric are better; max: higher values. Left out: min for losses and errors, max for other metrics."""
    patience: PositiveInt | None = None
    """Early stopping: end the run after this many evaluations in a row without a better metric. Empty: never."""
    generate: GenerateConfig | None = None
    """Generate answers to held-out prompts in each evaluation, and compare or score them. docqa and temporal generate answers without this block too."""

    @model_validator(mode="before")
    @classmethod
    def _infer_best(cls, values: Any) -> Any:
        """Fill in `best` by the metric's name; transformers infers greater_is_better likewise, from `loss` alone."""
        if not isinstance(values, dict) or "best" in values or not isinstance(values.get("metric", "loss"), str):
            return values
        return {**values, "best": "min" if values.get("metric", "loss").endswith(LOWER_IS_BETTER) else "max"}


class SaveConfig(Section):
    """Checkpoints."""

    every: PositiveInt | Literal["epoch"] = 200
    """Steps between two checkpoints, or epoch; the last step is always saved."""
    keep: PositiveInt | None = 3
    """Number of latest checkpoints to keep, in addition to the best; null: all."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    background: bool = False
    """Write checkpoints in the background from a copy in host memory, so that training waits only for the copy. Not available with NVMe offload."""
    prune_when_full: bool = False
    """If the disk has no space for another checkpoint, delete older ones first, but never the newest complete one."""
    copy_to: str | None = None
    """Absolute path or URL (`s3://bucket/runs`, `sftp://host/runs`: fsspec) of a folder for a second copy of the run's checkpoints, `COPY_TO/NAME OF THE RUN FOLDER`. The copies are made in the background. A run folder without a checkpoint continues from there. Copies of another run are left alone: exit code 2."""

    @field_validator("copy_to")
    @classmethod
    def _check_copy_to(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value and not Path(value).expanduser().is_absolute():
            raise ValueError(
                f"{value} is neither an absolute path nor a URL; write one such as /mnt/backup/runs, s3://bucket/runs or "
                "sftp://host/runs"
            )
        return value


class ProfileConfig(Section):
    """Profiler."""

    steps: tuple[PositiveInt, PositiveInt]
    """First and last step to profile, counted from 1 as in metrics.jsonl."""
    memory: bool = False
    """Also record memory allocations."""


class SlurmConfig(Section):
    """Job of `--launcher slurm`."""

    partition: str | None = None
    """Partition; default: Slurm's."""
    account: str | None = None
    """Account; default: the user's."""
    time: str | None = None
    """Time limit in sbatch's format, quoted in YAML: "24:00:00"; default: the partition's."""
    setup: list[str] = []
    """Shell lines of the job script before srun, such as `module load cuda`."""


class LaunchConfig(Section):
    """Launcher."""

    env: list[EnvVar] = []
    """Environment variables for every rank on every host: NAME (its value on the launching host) or NAME=value."""
    grace_seconds: NonNegativeFloat | None = 30.0
    """Seconds between the scheduler's SIGTERM and SIGKILL; slower checkpoints cause a warning. null: unknown."""
    heartbeat_timeout_seconds: Annotated[float, Field(ge=3, le=1e6)] = 30.0
    """If a host sends no message for this long, the launch ends on all hosts."""
    slurm: SlurmConfig = SlurmConfig()
    """Options of the job of `--launcher slurm`."""


class RunConfig(Section):
    """A complete recipe."""

    task: str = ""
    """A packaged task (`dstrain tasks`), a file path, or a dotted module."""
    options: dict[str, Any] = {}
    """Options of the task (`dstrain tasks NAME` documents them)."""
    model: ModelConfig = ModelConfig()
    """Model, tokenizer and trained parameters."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 if the GPU supports it, else fp16; fp32 on a CPU."""
    data: DataConfig = DataConfig()
    """Training and held-out data."""
    ds_config: str = "zero2"
    """DeepSpeed preset (`dstrain presets`), the path of a DeepSpeed JSON, or auto: the fastest preset that fits."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes: any two of total, micro, accumulate."""
    parallel: ParallelConfig = ParallelConfig()
    """Processes that share a micro-batch."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning-rate schedule."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Alternative to `steps`: passes over the data. Default if neither is set: 1."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Random seed for data order, initial weights and dropout."""
    deterministic: bool = False
    """Bit-identical results also on a GPU, at some cost in speed."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step with inf or nan is always skipped; stop ends the run after 3 in a row."""
    timeout_minutes: Annotated[float, Field(ge=0.1, le=1e6)] = 10.0
    """Timeout of collectives in minutes."""
    log: LogConfig = LogConfig()
    """Logging of metrics."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out data."""
    save: SaveConfig = SaveConfig()
    """Checkpoint interval and retention."""
    profile: ProfileConfig | None = None
    """Profile some steps: trace, FLOPs of each module, memory."""
    launch: LaunchConfig = LaunchConfig()
    """Launcher settings."""


Violation = tuple[tuple[str, ...], str, str]
"""Key, problem, fix."""
MIN_VOCAB_SIZE = {"bytes": 256 + 2, "data": 16}
"""Alphabet -> smallest vocabulary; a byte-level one has all 256 bytes, a pad token and an EOS token."""


def check_cross_fields(config: RunConfig) -> list[Violation]:
    """Return every violated rule."""
    return [*_check_task_and_model(config), *_check_data(config), *_check_optimization(config), *_check_profile(config)]


def _check_task_and_model(config: RunConfig) -> Iterator[Violation]:
    if not config.task:
        yield ("task",), "is missing", "write `task: rm`, or pass --task; `dstrain tasks` lists them"
    model = config.model
    if model.path and model.config:
        yield (
            ("model", "config"),
            "model.path and model.config are both set",
            "keep path to load weights, or config to start from scratch",
        )
    if model.config is not None and not isinstance(model.config.get("model_type"), str):
        yield ("model", "config"), "has no model_type", "add e.g. `model_type: llama`"
    if isinstance(model.tokenizer, TokenizerConfig):
        tokenizer = model.tokenizer
        least, kind = MIN_VOCAB_SIZE[tokenizer.alphabet], "byte-level" if tokenizer.alphabet == "bytes" else "trained"
        if tokenizer.vocab_size < least:
            problem = f"is {tokenizer.vocab_size}, but a {kind} tokenizer has at least {least} entries"
            yield ("model", "tokenizer", "vocab_size"), problem, "raise it"
    targets = None if model.lora is None else model.lora.targets
    if isinstance(targets, str) and re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)+", targets):
        problem = f"is one text, {targets!r}, which is the name of no module"
        yield ("model", "lora", "targets"), problem, f"write a list: [{targets}]"
    if config.precision != "auto":
        yield from check_dtype(config, config.precision)


def check_dtype(config: RunConfig, precision: str) -> Iterator[Violation]:
    """Yield a violation for weights loaded in a 16-bit dtype that the run does not use.

    In fp32 the optimizer updates the loaded weights themselves, without an fp32 copy.
    """
    dtype = config.model.dtype
    if precision == "fp32" and dtype in ("bfloat16", "float16"):
        problem = (
            f"is {dtype} while precision is fp32, and updates of the optimizer would be lost to rounding in {dtype}"
        )
        yield ("model", "dtype"), problem, "leave model.dtype out, or write precision: bf16"
    elif precision == "bf16" and dtype == "float16":
        yield ("model", "dtype"), f"is {dtype} while precision is {precision}", "leave model.dtype out"


def _check_data(config: RunConfig) -> Iterator[Violation]:
    data = config.data
    if data.eval and data.eval_fraction:
        yield ("data", "eval_fraction"), "data.eval and data.eval_fraction are both set", "remove one"
    if data.max_prompt_length and data.max_prompt_length > data.max_length:
        yield (
            ("data", "max_prompt_length"),
            f"is {data.max_prompt_length}, above data.max_length ({data.max_length})",
            "lower it",
        )
    if config.eval.generate is not None and data.eval is None and not data.eval_fraction:
        yield ("eval", "generate"), "is set, but no data is held out", "set data.eval or data.eval_fraction"

    if config.eval.patience and not (data.eval or data.eval_fraction):
        problem = "needs evaluations, but there is no held-out data"
        yield ("eval", "patience"), problem, "set data.eval or data.eval_fraction, or remove it"


UNUSED_OPTIMIZER_KEYS = {"sgd": ("betas", "eps"), "adafactor": ("betas", "eps"), "lion": ("eps",)}
"""optim.name -> keys of optim that it does not read; sgd has no momentum."""


def _check_optimization(config: RunConfig) -> Iterator[Violation]:
    if config.steps is not None and config.epochs is not None:
        yield ("epochs",), "epochs and steps are both set", "remove one"
    batch, optim = config.batch, config.optim
    if batch.total and batch.micro and batch.micro > batch.total:
        yield ("batch", "micro"), f"is {batch.micro}, above batch.total ({batch.total})", "lower it or raise total"
    if batch.prefix_sharing is True and batch.packing is False:
        yield ("batch", "prefix_sharing"), "is true while batch.packing is false", "remove one"
    yield from _check_tokens_per_micro(batch)
    if config.steps is not None:
        yield from check_warmup(optim.warmup, config.steps)
    if optim.loraplus_lr_ratio is None and optim.loraplus_lr_embedding != 1.0e-6:
        yield (
            ("optim", "loraplus_lr_embedding"),
            "has no effect without optim.loraplus_lr_ratio",
            "set that, or remove it",
        )
    if config.model.neftune_noise_alpha is not None and config.parallel.sequence > 1:
        problem = f"is set while parallel.sequence is {config.parallel.sequence}: each process would draw other noise"
        yield ("model", "neftune_noise_alpha"), problem, "remove one of them"
    if optim.lr == 0 and any(group.lr for group in optim.groups.values()):
        yield (
            ("optim", "lr"),
            "is 0, but the rates of optim.groups are stored as multiples of it",
            "set a rate, and freeze the other parameters with model.freeze",
        )
    for name in UNUSED_OPTIMIZER_KEYS.get(optim.name, ()):
        if getattr(optim, name) != type(optim).model_fields[name].default:
            yield ("optim", name), f"has no effect with optim.name {optim.name}", "remove it"
    if optim.scale_lr == "none" and optim.scale_lr_base != type(optim).model_fields["scale_lr_base"].default:
        yield ("optim", "scale_lr_base"), "has no effect while optim.scale_lr is none", "set scale_lr to linear or sqrt"


def check_warmup(warmup: float, steps: int) -> Iterator[Violation]:
    """Yield a violation for a warmup that is longer than the run, whose rate would never reach `optim.lr`."""
    if warmup > steps:
        yield ("optim", "warmup"), f"is {warmup:g} of only {steps} steps", "lower it, or give a fraction below 1"


def _check_tokens_per_micro(batch: BatchConfig) -> Iterator[Violation]:
    if batch.tokens_per_micro and batch.total is None:
        yield (
            ("batch", "total"),
            "is not set, and batch.tokens_per_micro needs it",
            "write the samples per optimizer step",
        )
    if batch.tokens_per_micro and batch.accumulate:
        problem = "is set together with batch.tokens_per_micro, from which the number of passes follows"
        yield ("batch", "accumulate"), problem, "remove one of them"


def _check_profile(config: RunConfig) -> Iterator[Violation]:
    if config.profile is not None and config.profile.steps[1] < config.profile.steps[0]:
        first, last = config.profile.steps
        yield (
            ("profile", "steps"),
            f"ends with step {last}, before its first step {first}",
            f"write the first and the last step: [{last}, {first}]",
        )
