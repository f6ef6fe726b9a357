"""Cross-field validation rules of the recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dstrain.config.schema import BatchConfig, RunConfig, TokenizerConfig

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
