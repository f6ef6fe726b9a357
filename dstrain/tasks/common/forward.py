"""Forward passes over batches: logits, log-probabilities of answers, and vision inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dstrain.batch import Batch
from dstrain.data.loading.collate import loss_positions
from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS
from dstrain.models.attention_mask import needs_attention_mask
from dstrain.models.heads.chunked_lm_head import capture_head_input, rows_per_chunk, score_logits


def score_answers(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """((B, K) log p of the last K tokens of each row, (B, K) whether each is the likeliest); 0 and false where not learnt.

    Only the learnt positions, where `learnt` (B, K) is 1, become logits, and only some of them at once.
    """
    learnt, ids = batch.tensors["learnt"], batch.tensors["input_ids"]  # (B, K), (B + blank rows, L)
    count, last = learnt.shape
    assert 0 < last < ids.shape[1], "the first token is nobody's target"
    found = capture_head_input(unwrap_peft(model), lambda: _target_logits(model, batch, last))
    if isinstance(found, torch.Tensor):
        return score_tokens(found[:count, -last - 1 : -1], ids[:count, -last:], learnt)
    length, kept = ids.shape[1], found.hidden_states.shape[1]
    row, column = _get_loss_positions(batch).unbind(1)  # (N,), (N,)
    before = row * kept + column - 1 - (length - kept)  # (N,) of (B * kept,): the position before each target
    rows = found.hidden_states.flatten(0, 1).index_select(0, before)  # (N, H)
    targets = ids.flatten().index_select(0, row * length + column)
    at = row * last + column - (length - last)  # (N,) of (B * K,)
    whole = (one.new_zeros(count * last).index_copy(0, at, one) for one in found.score_targets(rows, targets))
    log_probs, right = (one.view_as(learnt) for one in whole)
    return log_probs, right


def _get_loss_positions(batch: Batch) -> torch.Tensor:
    """(N, 2) row and column of each learnt token in `input_ids`.

    Counted on the device, which the host waits for, where the batch does not bring them.
    """
    if "loss_positions" in batch.tensors:
        return batch.tensors["loss_positions"]
    return loss_positions(batch.tensors["learnt"], batch.tensors["input_ids"].shape[1])


def answer_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """(B, K) log p of the last K tokens of each row, 0 where `learnt` (B, K) is 0."""
    return score_answers(model, batch)[0]


def score_tokens(
    logits: torch.Tensor, targets: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `score_answers`, of logits (B, K, V) that speak of the targets (B, K).

    Kept for the backward pass are the logits as they came, and no fp32 copies of them.
    """
    rows = logits.flatten(0, 1)  # (B * K, V)
    size = rows_per_chunk(rows.shape[-1], rows.device)
    if len(rows) <= size:
        log_probs, right = score_logits(rows, targets.flatten())
    else:
        pieces = zip(rows.split(size), targets.flatten().split(size), strict=True)
        found = [checkpoint(score_logits, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        log_probs, right = (torch.cat(column) for column in zip(*found, strict=True))
    return log_probs.view_as(loss_mask).masked_fill(loss_mask == 0, 0.0), right.view_as(loss_mask) & (loss_mask != 0)


def count_exact_answers(is_correct: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(answers of which every token is right, answers): of (B, K), where learnt tokens side by side are one answer.

    What a model writes greedily begins with such an answer, where those before it in the dialog were given.
    """
    loss_mask = loss_mask != 0
    begins = loss_mask & ~torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    number = begins.flatten().cumsum(0)  # (B * K,): which answer a token belongs to, counted from 1
    wrong = torch.zeros(loss_mask.numel() + 1, dtype=torch.long, device=loss_mask.device)
    wrong.index_add_(0, number, (loss_mask & ~is_correct).flatten().long())
    count = begins.sum()
    return count - (wrong != 0).sum(), count


def _target_logits(model: torch.nn.Module, batch: Batch, num_targets: int) -> torch.Tensor:
    """(B + blank rows, …, V) logits of the last K + 1 positions, or of all where the family cannot leave any out."""
    keep = (
        {"logits_to_keep": num_targets + 1}
        if "logits_to_keep" in _parameter_names(type(unwrap_peft(model)).forward)
        else {}
    )
    return _forward(model, batch, use_cache=False, **keep).logits


def forward_logits(model: torch.nn.Module, batch: Batch, **model_kwargs: Any) -> torch.Tensor:
    """(B, …) logits of the batch's rows, its images seen."""
    logits = _forward(model, batch, **model_kwargs).logits
    return logits[: len(logits) - batch.dummy_rows]


def _forward(model: torch.nn.Module, batch: Batch, **model_kwargs: Any) -> Any:
    """What the model returns for the batch's rows and its blank ones, all padded on the right."""
    mask = {"attention_mask": batch.tensors["attention_mask"]} if needs_attention_mask(unwrap_peft(model)) else {}
    return model(input_ids=batch.tensors["input_ids"], **mask, **vision_inputs(model, batch), **model_kwargs)


def vision_inputs(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """What the model takes of the batch's images, and of which tokens are images or prompt, under its family's names."""
    seen, core = dict(batch.vision), unwrap_peft(model)
    kinds, family = seen.pop(MM_TOKEN_TYPE_IDS, None), str(getattr(getattr(core, "config", None), "model_type", ""))
    known = _parameter_names(type(core).forward) | _parameter_names(type(getattr(core, "base_model", core)).forward)
    if family == "paligemma":
        return {**seen, "token_type_ids": prefix_token_types(batch)}
    if kinds is None:
        return seen
    if MM_TOKEN_TYPE_IDS in known:
        return {**seen, MM_TOKEN_TYPE_IDS: kinds}
    return {**seen, "token_type_ids": kinds} if family.startswith("gemma3") and "token_type_ids" in known else seen


def prefix_token_types(batch: Batch) -> torch.Tensor:
    """(B + blank rows, L) int64: 1 from the first learnt token of a row on, 0 before it and where nothing is learnt.

    PaliGemma reads what is 0 both ways and the rest from left to right: Beyer et al. (arXiv 2407.07726), figure 2. Told
    nothing, transformers' (5.23) reads rows without padding both ways, and would see the answer that it is to predict.
    """
    ids = batch.tensors["input_ids"]
    learnt = batch.tensors.get("learnt", ids.new_zeros(0, 1))
    whole = F.pad(learnt, (ids.shape[1] - learnt.shape[1], 0, 0, len(ids) - len(learnt)))
    return (whole.cumsum(1) > 0).long()


def unwrap_peft(model: torch.nn.Module) -> torch.nn.Module:
    """The model of transformers inside peft's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@cache
def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
