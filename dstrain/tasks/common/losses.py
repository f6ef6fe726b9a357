"""Losses on tensors, each as its paper writes it."""

from __future__ import annotations

import copy
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


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    center: float = 0.0,
) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin) per pair; (B,), (B,) -> (B,).

    Margin: Llama 2 (arXiv 2307.09288), eq. 2. `center` adds center * (chosen + rejected)^2, which keeps the
    scores around 0: Eisenstein et al. (arXiv 2312.09244), eq. 2. `label_smoothing` takes this share of the
    labels for flipped: Mitchell, a note on DPO with noisy preferences (2023), eq. 3, for rewards.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-difference)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return loss


def disable_dropout_in_model(model: torch.nn.Module) -> None:
    """Set every chance of dropping something (units, paths, whole layers) to 0; the model's own config keeps what it says.

    Parts that read a chance from their config as they run (Falcon, Hubert) get a copy of it. The noise that routers of
    experts add (jitter) is no dropout and stays.
    """
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}  # deepcopy's memo: parts that shared a config share its copy
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in name or name == "config"):  # Idefics keeps a dropout as `config`
                setattr(module, name, 0.0)
            elif isinstance(value, PretrainedConfig) and module is not model:
                setattr(module, name, _zero_config_dropout(copy.deepcopy(value, copies)))


def _zero_config_dropout(config: Any) -> Any:
    """The same config, its chances 0; those inside it too."""
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_diff_dict"):  # a config too
            _zero_config_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


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


def dpo_sigmoid(logits: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """-log sigmoid(beta h) per pair, h the difference of the two log-ratios; (B,) -> (B,).

    Rafailov et al. (arXiv 2305.18290), eq. 7; label smoothing: Mitchell (2023), eq. 3.
    """
    loss = -F.logsigmoid(beta * logits)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-beta * logits)
    return loss


def robust_dpo(logits: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """The sigmoid loss, unbiased where a share of the labels is flipped: Chowdhury et al. (arXiv 2403.00409), eq. 12."""
    right, flipped = -F.logsigmoid(beta * logits), -F.logsigmoid(-beta * logits)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def ipo(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """(h - 1 / (2 beta))^2 per pair: Azar et al. (arXiv 2310.12036), eq. 17, beta being its tau."""
    return (logits - 1 / (2 * beta)).square()


def hinge(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """max(0, 1 - beta h) per pair: SLiC, Zhao et al. (arXiv 2305.10425), eq. 1, with a margin of 1 as in RSO."""
    return F.relu(1 - beta * logits)


def simpo(logits: torch.Tensor, beta: float, gamma: float) -> torch.Tensor:
    """-log sigmoid(beta h - gamma), h the difference of mean log-probabilities: Meng et al. (arXiv 2405.14734), eq. 6."""
    return -F.logsigmoid(beta * logits - gamma)


def kto(
    log_ratio: torch.Tensor, desirable: torch.Tensor, reference_point: torch.Tensor | float, beta: float
) -> torch.Tensor:
    """1 - sigmoid(beta (r - z0)) of a desirable answer, 1 - sigmoid(beta (z0 - r)) of another; (B,), (B,) -> (B,).

    `ratio` is r, an answer's log-ratio to the reference, and `anchor` z0: Ethayarajh et al. (arXiv 2402.01306), eq. 8,
    for weights of 1. With an anchor of 0 it is the unpaired APO-zero: D'Oosterlinck et al. (arXiv 2408.06266).
    """
    sign = desirable.to(log_ratio.dtype) * 2 - 1
    return torch.sigmoid(-sign * beta * (log_ratio - reference_point))


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """-log sigmoid of the log odds ratio, from mean log-probabilities (B,): Hong et al. (arXiv 2403.07691), eq. 4 and 7."""
    odds = [mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7))) for mean in (chosen, rejected)]  # finite at p = 1
    return -F.logsigmoid(odds[0] - odds[1])
