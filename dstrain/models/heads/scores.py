"""Scores of target tokens under logits, and how many logits are held at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

# Shapes: N targets, V vocabulary.

MAX_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Device type -> bytes of the fp32 logits of one chunk.

On a GPU chunks are larger, because launching the kernels of one takes the host about 0.4 ms.
"""


class TokenScores(NamedTuple):
    """Scores of one target token per row."""

    log_probs: torch.Tensor
    """(N,) log-probability of each target, in fp32 or fp64."""
    is_correct: torch.Tensor | None = None
    """(N,) bool: True where the target is the most probable token; None where it was not requested."""
    mean_log_probs: torch.Tensor | None = None
    """(N,) mean of the log-probabilities of all V tokens, for label smoothing; None where it was not requested."""


class ScoreFields(NamedTuple):
    """Which fields of TokenScores are requested, in addition to `log_probs`."""

    is_correct: bool = True
    mean_log_probs: bool = False

    def select(self, scores: TokenScores) -> tuple[torch.Tensor, ...]:
        """Return the fields that are not None."""
        return tuple(column for column in scores if column is not None)

    def name(self, columns: tuple[torch.Tensor, ...]) -> TokenScores:
        """Return the scores of which `select` returned the fields."""
        rest = iter(columns[1:])
        return TokenScores(columns[0], *(next(rest) if is_requested else None for is_requested in self))


DEFAULT_FIELDS = ScoreFields()


def score_logits(logits: torch.Tensor, targets: torch.Tensor, fields: ScoreFields = DEFAULT_FIELDS) -> TokenScores:
    """Return the scores of targets (N,) under logits (N, V)."""
    exact = logits if logits.dtype == torch.float64 else logits.float()  # (N, V)
    # Faster than logsumexp, whose exponentials torch computes without vector instructions on a CPU.
    log_probs = -F.cross_entropy(exact, targets, reduction="none")  # (N,)
    mean = None
    if fields.mean_log_probs:
        normalizer = exact.gather(-1, targets[:, None]).squeeze(-1) - log_probs  # (N,)
        # Without a tensor of log-probabilities, which would be another (N, V).
        mean = exact.mean(-1) - normalizer
    return TokenScores(log_probs, is_argmax(exact, targets) if fields.is_correct else None, mean)


@torch.no_grad()
def is_argmax(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return True where a target is the argmax of its row, (N,); of equal logits it is the first one."""
    if logits.device.type != "cpu":
        return logits.argmax(-1) == targets
    # torch's argmax takes 8 times as long as its maximum on a CPU, so only for rows whose target has the maximum.
    found = logits.gather(-1, targets[:, None]).squeeze(-1) == logits.amax(-1)
    (rows,) = found.nonzero(as_tuple=True)
    found[rows] = logits[rows].argmax(-1) == targets[rows]
    return found


def rows_per_chunk(vocab_size: int, device: torch.device, item_bytes: int = 4, share: float = 1.0) -> int:
    """Return how many rows of logits, of `item_bytes` each, take this share of the bytes of one chunk; at least 1.

    4 bytes: scores are computed in fp32.
    """
    limit = MAX_CHUNK_BYTES.get(device.type, MAX_CHUNK_BYTES["cuda"])
    return max(1, int(limit * share) // (item_bytes * vocab_size))
