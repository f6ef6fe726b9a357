"""Forward passes that return scores of targets, and dropout in training alone."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F

from dstrain.batch import Batch
from dstrain.data.loading.rows import loss_positions
from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS
from dstrain.models.attention.model_types import needs_no_mask
from dstrain.models.attention.packed import has_packed_attention, packed_model_kwargs
from dstrain.models.attention.sequence import sum_over_sequence
from dstrain.models.heads import ChunkFunction, HeadInput, ScoreFields, TokenScores, capture_head_input
from dstrain.models.patches import features_placed_without_waits, padding_known, rows_of_one_sequence
from dstrain.models.router_loss import router_logits_disabled

# Shapes: B rows, L tokens, K targets, V vocabulary. A model is one of transformers, out of peft's wrapper (`unwrap_peft`).


def score_targets(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p, and whether it is the argmax, of the last K tokens of each row; both (B, K).

    A packed batch has the same B rows in one. Both are 0 where the loss mask, the batch's tensor `loss_mask` (B, K), is
    0. Logits are computed only for the positions in the loss, a chunk at a time, since (B, L, V) logits would be the
    largest tensor of a step.
    """
    scores = _score(model, batch, ScoreFields())
    assert scores.is_correct is not None, "requested"
    return scores.log_probs, scores.is_correct


def score_targets_with_mean(model: torch.nn.Module, batch: Batch) -> TokenScores:
    """Return the two tensors of `score_targets`, and the mean log-probability of the vocabulary; each (B, K)."""
    return _score(model, batch, ScoreFields(mean_log_probs=True))


def _score(model: torch.nn.Module, batch: Batch, fields: ScoreFields) -> TokenScores:
    """Return the scores of the targets at their places, (B, K) each; 0 elsewhere."""
    found, rows, targets, at = _forward_to_head(model, batch)
    scores = found.score_targets(rows, targets, fields)
    return fields.name(tuple(_scatter(one, at, batch) for one in fields.select(scores)))


def map_target_logits(
    model: torch.nn.Module, batch: Batch, function: ChunkFunction, choices: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the results of `function` on the logits and the ids of targets, at their places, (B, K, …); 0 elsewhere.

    It gets (n, V) and (n, 1 + k), a chunk at a time: the id of the target, and those of `choices`, (B, K, k).
    """
    found, rows, targets, at = _forward_to_head(model, batch)
    ids = targets[:, None]
    if choices is not None:
        ids = torch.cat([ids, choices.flatten(0, 1).index_select(0, at)], -1)
    return tuple(_scatter(one, at, batch) for one in found.map_logits(rows, ids, function))


def _forward_to_head(
    model: torch.nn.Module, batch: Batch
) -> tuple[HeadInput, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the head's input, and of the N targets: states (N, H), ids (N,), indices in the flattened (B * K,)."""
    if batch.is_packed:
        found = capture_head_input(model, lambda: _packed_logits(model, batch))
        return found, found.hidden_states[0], batch.tensors["target_ids"], batch.tensors["target_indices"]
    found = capture_head_input(model, lambda: _target_logits(model, batch))
    return found, *_select_targets(found.hidden_states, batch)


def _scatter(values: torch.Tensor, at: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the values (N, …) of targets at their places, (B, K, …); with those of the batch's other processes."""
    if batch.sequence is not None and not values.is_floating_point():
        return _scatter(values.float(), at, batch).to(values.dtype)
    loss_mask, shape = batch.tensors["loss_mask"], values.shape[1:]
    whole = values.new_zeros(loss_mask.numel(), *shape).index_copy(0, at, values)
    return sum_over_sequence(whole, batch.sequence).view(*loss_mask.shape, *shape)


def _select_targets(hidden_states: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of the N targets of padded rows: the states before them (N, H), their ids, their indices in (B * K,).

    `hidden_states`: of the last positions of `input_ids`, at least K + 1 of them.
    """
    ids, last = batch.tensors["input_ids"], batch.tensors["loss_mask"].shape[1]  # (B + blank rows, L), K
    length, kept = ids.shape[1], hidden_states.shape[1]
    row, column = _get_loss_positions(batch).unbind(1)  # (N,), (N,)
    before = row * kept + column - 1 - (length - kept)  # position t predicts token t + 1
    rows = hidden_states.flatten(0, 1).index_select(0, before)
    return rows, ids.flatten().index_select(0, row * length + column), row * last + column - (length - last)


def _packed_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits that predict the targets of a packed batch, (1, N, V)."""
    before = batch.tensors["logit_positions"]  # (N,) of (T,): the token before each target
    if "logits_to_keep" in _parameter_names(type(model).forward):
        return _forward(model, batch, use_cache=False, logits_to_keep=before).logits
    return _forward(model, batch, use_cache=False).logits.index_select(1, before)


def forward_scores(model: torch.nn.Module, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a reward model's head at these positions of a packed row, (R,) -> (R, labels).

    Base model and head are called one after the other, as modules, so that ZeRO-3 gathers their weights and adapters
    take part. The model's own `forward` would read one position of the row.
    """
    core: Any = model
    states = _forward(core.base_model, batch, use_cache=False).last_hidden_state[0]  # (T, H), or a part of the tokens
    if batch.sequence is None:
        return core.score(states.index_select(0, positions))
    here = positions - batch.sequence.rank * len(states)
    scores = core.score(states.index_select(0, here.clamp(0, len(states) - 1)))
    is_here = (here >= 0) & (here < len(states))
    return sum_over_sequence(torch.where(is_here[:, None], scores, 0.0), batch.sequence)


def _get_loss_positions(batch: Batch) -> torch.Tensor:
    """Return row and column in `input_ids` of each token in the loss, (N, 2).

    Computed here, which synchronizes host and device, only where `collate` has not put them into the batch.
    """
    if "loss_positions" in batch.tensors:
        return batch.tensors["loss_positions"]
    return loss_positions(batch.tensors["loss_mask"], batch.tensors["input_ids"].shape[1])


def answer_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return log p of the last K tokens of each row, (B, K), 0 where the loss mask `loss_mask` is 0."""
    return _score(model, batch, ScoreFields(is_correct=False)).log_probs


def count_exact_answers(is_correct: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of answers with every token correct, and of answers; from (B, K), (B, K).

    A run of consecutive tokens in the loss is one answer. Greedy generation gives exactly the correct ones, given
    the conversation before them.
    """
    loss_mask = loss_mask != 0
    # (B, K), True at the first token of each answer.
    begins = loss_mask & ~torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    number = begins.flatten().cumsum(0)  # (B * K,): number of a token's answer, from 1
    # Index 0 takes the tokens before the first answer, which are never wrong.
    wrong = torch.zeros(loss_mask.numel() + 1, dtype=torch.long, device=loss_mask.device)
    wrong.index_add_(0, number, (loss_mask & ~is_correct).flatten().long())
    count = begins.sum()
    return count - (wrong != 0).sum(), count


def _target_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return logits of the last K + 1 positions, or of all where the family has no `logits_to_keep`."""
    num_targets = batch.tensors["loss_mask"].shape[1]
    assert 0 < num_targets < batch.tensors["input_ids"].shape[1], "the first token is never a target"
    keep = {"logits_to_keep": num_targets + 1} if "logits_to_keep" in _parameter_names(type(model).forward) else {}
    return _forward(model, batch, use_cache=False, **keep).logits


def forward_logits(model: torch.nn.Module, batch: Batch, **model_kwargs: Any) -> torch.Tensor:
    """Return the logits of the batch's rows, (B, …), without dummy rows."""
    # Dummy rows come last.
    logits = _forward(model, batch, **model_kwargs).logits
    return logits[: len(logits) - batch.dummy_rows]


def _forward(model: torch.nn.Module, batch: Batch, **model_kwargs: Any) -> Any:
    """Run the model on the batch's rows and dummy rows, all padded on the right or packed. Returns its output."""
    assert not hasattr(model, "get_base_model"), "peft's wrapper hides the family: give the model inside, `unwrap_peft`"
    inputs = {"input_ids": batch.tensors["input_ids"], **vision_inputs(model, batch), **model_kwargs}
    with contextlib.ExitStack() as patches:
        if batch.vision:
            patches.enter_context(features_placed_without_waits(model))
        if batch.is_packed:
            _check_packed_attention(model)
            inputs |= packed_model_kwargs(batch)
            patches.enter_context(router_logits_disabled(model))
        elif needs_attention_mask(model):
            mask = inputs["attention_mask"] = batch.tensors["attention_mask"]
            patches.enter_context(padding_known(mask.shape, batch.has_padding))
        else:
            patches.enter_context(rows_of_one_sequence())
        return model(**inputs)


def _check_packed_attention(model: torch.nn.Module) -> None:
    """Assert that the model's attention reads the groups; others ignore them, and mix the sequences of the row."""
    if model not in _PACKED_MODELS:
        assert has_packed_attention(model), "a packed batch for a model without `enable_packed_attention`"
        _PACKED_MODELS.add(model)


_PACKED_MODELS: WeakSet[torch.nn.Module] = WeakSet()
"""Models whose attention was checked, which takes a walk over their modules."""


def needs_attention_mask(model: torch.nn.Module) -> bool:
    """Return True where the model needs an attention mask although all padding is on the right.

    Without a mask torch's attention uses `is_causal`, for which a GPU has flash attention. With a mask that contains a
    0 it uses an explicit mask (B, 1, L, L) (B rows, L tokens), and a slower kernel.
    """
    # The loss of a router is a mean over the tokens that the mask names.
    if getattr(model, "needs_padding_mask", False):
        return True
    of_transformers = type(model).__module__.startswith("transformers.")  # not code that came with the weights
    return not (of_transformers and needs_no_mask(model.config))


def vision_inputs(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the batch's vision tensors and token types, under the names that the model's family takes."""
    inputs = dict(batch.vision)
    kinds, family = inputs.pop(MM_TOKEN_TYPE_IDS, None), str(getattr(getattr(model, "config", None), "model_type", ""))
    known = _parameter_names(type(model).forward) | _parameter_names(type(getattr(model, "base_model", model)).forward)
    if family == "paligemma":
        return {**inputs, "token_type_ids": prefix_token_types(batch)}
    if kinds is None:
        return inputs
    if MM_TOKEN_TYPE_IDS in known:
        return {**inputs, MM_TOKEN_TYPE_IDS: kinds}
    return {**inputs, "token_type_ids": kinds} if family.startswith("gemma3") and "token_type_ids" in known else inputs


def prefix_token_types(batch: Batch) -> torch.Tensor:
    """Return 1 from the first token in the loss of a row on, else 0; (B + dummy rows, L) int64.

    PaliGemma attends to the 0s in both directions and to the rest causally: Beyer et al. (arXiv 2407.07726), figure 2.
    Without token types, transformers (5.23) attends in both directions in rows without padding, targets included.
    """
    ids = batch.tensors["input_ids"]
    loss_mask = batch.tensors.get("loss_mask", ids.new_zeros(0, 1))
    padding = ids.shape[1] - loss_mask.shape[1], 0, 0, len(ids) - len(loss_mask)
    return (F.pad(loss_mask, padding).cumsum(1) > 0).long()


@cache
def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def disable_dropout_in_model(model: torch.nn.Module) -> None:
    """Set every dropout probability (of units, paths, whole layers) to 0; the model's own config stays unchanged.

    Modules that read a probability from their config in the forward pass (Falcon, Hubert) get a copy of the config.
    The jitter of expert routers is not dropout and stays.
    """
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}  # deepcopy's memo: modules that share a config share its copy
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in name or name == "config"):  # Idefics keeps a dropout as `config`
                setattr(module, name, 0.0)
            elif isinstance(value, PretrainedConfig) and module is not model:
                setattr(module, name, _zero_config_dropout(copy.deepcopy(value, copies)))


def _zero_config_dropout(config: Any) -> Any:
    """Set the dropout probabilities of a config, and of the configs inside it, to 0. Returns it."""
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_diff_dict"):  # a nested config
            _zero_config_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config
