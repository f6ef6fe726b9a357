"""Compare the output head with the fused losses of liger-kernel and TRL: peaks of memory, launches, and exactness.

    python -m tools.cuda_emulator python -m benchmarks.liger_heads --to docs/measurements/kernels-head.md

Peaks and launches are those of one loss with its backward pass, in bf16 on an emulated CUDA device whose kernels do
nothing (EMU_VALUES=0): the hidden states and weights are there before and are not counted. Exactness comes from a CPU,
where Triton's interpreter computes liger's kernels, against fp64. liger's cross entropy gets all tokens with -100 for
those that are no targets, as trainers call it; its DPO loss gets the pairs of the batch one at a time (`chunk_size`).
With `distill` all compute the forward KL divergence from a teacher's head: dstrain over its 64 most probable tokens and
the others together, liger over all tokens (LigerFusedLinearJSD with beta 0). TRL's head is ChunkedLogProbFunction of TRL
1.16, which gets the targets alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import format_certificate, table, write_table
from tools.cuda_emulator.counts import read_counts

COUNTED = ("kernels", "products", "copies_on_device", "memsets")
DSTRAIN, FUSED, LIGER, TRL = "dstrain", "fused", "liger", "TRL"
"""dstrain with model.kernels none and liger, liger-kernel's fused losses, and TRL's head."""
EXACT_LIGER = "liger, fp32 sums"
"""liger's cross entropy with accum_dtype=torch.float32, which no trainer sets."""
MIB = 2**20
BETA = 0.1
TOP_K = 64
"""Tokens of the teacher that are a class each, the default of the task."""


@dataclass(frozen=True)
class HeadCase:
    """A head, and the hidden states that it gets. `tokens` are those of all rows together."""

    task: str
    vocabulary: int
    hidden: int
    tokens: int
    share: float
    """Share of tokens that are targets; the first ones of a row are not."""
    is_trained: bool = True
    """False for a frozen head, as with LoRA."""
    rows: int = 4
    """Of equal length. With dpo the first half are chosen answers, the others rejected ones."""
    dtype: torch.dtype = torch.bfloat16


def list_cases() -> list[HeadCase]:
    """Return the cases of the table."""
    sizes = list(product((32_000, 152_000), (2048, 4096), (2048, 8192), (1.0, 0.5)))
    trained = [HeadCase(task, *size) for task in ("sft", "dpo") for size in sizes]
    frozen = [HeadCase("sft", *size, is_trained=False) for size in sizes]
    return [*trained, *frozen, *(HeadCase("distill", *size) for size in sizes if size[1] == 2048)]


class HeadInputs:
    """Weight (V, H), hidden states (rows, length, H), labels (rows, length) of a case; and of a reference model."""

    def __init__(self, case: HeadCase, device: str, dtype: torch.dtype | None = None) -> None:
        length = case.tokens // case.rows
        torch.manual_seed(0)
        self.case = case
        self.head = torch.nn.Linear(case.hidden, case.vocabulary, bias=False, device=device, dtype=case.dtype)
        self.reference_head = torch.nn.Linear(case.hidden, case.vocabulary, bias=False, device=device, dtype=case.dtype)
        self.hidden_states = torch.randn(case.rows, length, case.hidden, device=device, dtype=case.dtype)
        self.reference_states = torch.randn(case.rows, length, case.hidden, device=device, dtype=case.dtype)
        targets = torch.randint(0, case.vocabulary, (case.rows, length))
        is_target = (torch.arange(length) >= length * (1 - case.share)).expand(case.rows, length)
        self.target_indices = is_target.flatten().nonzero().squeeze(1).to(device)
        self.targets = targets[is_target].to(device)
        self.labels = targets.masked_fill(~is_target, -100).to(device)
        if dtype is not None:
            for module in (self.head, self.reference_head):
                module.to(dtype)
            self.hidden_states = self.hidden_states.to(dtype)
            self.reference_states = self.reference_states.to(dtype)
        self.head.weight.requires_grad_(case.is_trained)
        self.reference_head.weight.requires_grad_(False)
        self.hidden_states.requires_grad_(True)


def dpo_loss(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of log-probabilities (rows,): the first half are those of chosen answers."""
    (chosen, rejected), (chosen_before, rejected_before) = log_probs.chunk(2), reference.chunk(2)
    margin = (chosen - chosen_before) - (rejected - rejected_before)
    return -torch.nn.functional.logsigmoid(BETA * margin).mean()


ScoreFunction = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""Head, hidden states (N, H) of targets, targets (N,) -> log-probabilities (N,)."""


def run_scores(inputs: HeadInputs, score: ScoreFunction) -> torch.Tensor:
    """Return the loss from the log-probabilities of the targets alone."""

    def score_targets(head: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return score(head, hidden_states.flatten(0, 1).index_select(0, inputs.target_indices), inputs.targets)

    log_probs = score_targets(inputs.head, inputs.hidden_states)
    if inputs.case.task == "sft":
        return -log_probs.mean()
    with torch.no_grad():
        reference = score_targets(inputs.reference_head, inputs.reference_states)
    rows = inputs.case.rows
    return dpo_loss(log_probs.view(rows, -1).sum(1), reference.view(rows, -1).sum(1))


def score_by_dstrain(head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from dstrain.models.heads import HeadInput, ScoreFields

    fields = ScoreFields(is_correct=False)
    return HeadInput(head, rows[None], ()).score_targets(rows, targets, fields).log_probs


def score_by_fused(head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from dstrain.models.fused_cross_entropy import fuse_cross_entropy

    fuse_cross_entropy(head)
    return score_by_dstrain(head, rows, targets)


def distill_by_dstrain(inputs: HeadInputs) -> torch.Tensor:
    """Return the mean divergence of the targets' classes: the teacher's most probable tokens, and the others together."""
    from dstrain.models.heads import HeadInput
    from dstrain.tasks.distill import class_log_probs, divergence, top_classes

    vocabulary = inputs.case.vocabulary
    rows, reference_rows = (
        states.flatten(0, 1).index_select(0, inputs.target_indices)
        for states in (inputs.hidden_states, inputs.reference_states)
    )
    with torch.no_grad():
        teacher, ids = HeadInput(inputs.reference_head, reference_rows[None], ()).map_logits(
            reference_rows, inputs.targets, lambda logits, _: top_classes(logits, TOP_K, vocabulary, 1.0)
        )
    (student,) = HeadInput(inputs.head, rows[None], ()).map_logits(
        rows, ids, lambda logits, ids: (class_log_probs(logits, ids, 1.0),)
    )
    return divergence(student, teacher, "forward_kl").mean()


def score_by_trl(head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    arguments = (head.weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ())
    return ChunkedLogProbFunction.apply(rows, *arguments)[0]


def score_whole(head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute all logits at once, as the loss is defined."""
    return head(rows).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def run_liger(inputs: HeadInputs, accum_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the loss by liger's fused linear cross entropy, or its fused linear DPO loss."""
    if inputs.case.task == "sft":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)
        return loss(inputs.head.weight, inputs.hidden_states.flatten(0, 1), inputs.labels.flatten())
    if inputs.case.task == "distill":
        from liger_kernel.transformers import LigerFusedLinearJSD

        states, reference_states = inputs.hidden_states.flatten(0, 1), inputs.reference_states.flatten(0, 1)
        divergence = LigerFusedLinearJSD(jsd_beta=0.0)
        return divergence(
            states, inputs.head.weight, reference_states, inputs.reference_head.weight, inputs.labels.flatten()
        )
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    # torch.compile, its default, is off: on this device it would compile for minutes per case.
    preference = LigerFusedLinearDPOLoss(beta=BETA, compiled=False)
    result, _ = preference(
        inputs.head.weight,
        inputs.hidden_states,
        inputs.labels,
        ref_input=inputs.reference_states,
        ref_weight=inputs.reference_head.weight,
    )
    return result


def run_dstrain(inputs: HeadInputs) -> torch.Tensor:
    return distill_by_dstrain(inputs) if inputs.case.task == "distill" else run_scores(inputs, score_by_dstrain)


WAYS: dict[str, Callable[[HeadInputs], torch.Tensor]] = {
    DSTRAIN: run_dstrain,
    FUSED: lambda inputs: run_scores(inputs, score_by_fused),
    LIGER: run_liger,
    TRL: lambda inputs: run_scores(inputs, score_by_trl),
    EXACT_LIGER: lambda inputs: run_liger(inputs, torch.float32),
}


def measure_case(case: HeadCase, way: str) -> tuple[float, int]:
    """Return the peak in MiB beyond weights and hidden states, and the launches, of a loss with its backward pass."""
    inputs = HeadInputs(case, "cuda")
    for _ in range(2):  # the first pass compiles
        inputs.head.weight.grad = inputs.hidden_states.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base, before = torch.cuda.memory_allocated(), count_launches()
        WAYS[way](inputs).backward()
        peak, launches = torch.cuda.max_memory_allocated() - base, count_launches() - before
    return peak / MIB, launches


def count_launches() -> int:
    """Return the launches of this process since it began."""
    counts = read_counts()
    return sum(counts[kind] for kind in COUNTED)


def measure_cases() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table of peaks and launches."""
    for case in list_cases():
        row: dict[str, Any] = {
            "loss": case.task + ("" if case.is_trained else ", head frozen"),
            "vocabulary": case.vocabulary,
            "hidden": case.hidden,
            "tokens": case.tokens,
            "targets": f"{case.share:.0%}",
        }
        ways = (DSTRAIN, LIGER) if case.task == "distill" else (DSTRAIN, FUSED, LIGER, TRL)
        figures = {way: measure_case(case, way) for way in ways}
        for way in (DSTRAIN, FUSED, LIGER, TRL):
            row[f"{way}, MiB"] = round(figures[way][0]) if way in figures else "-"
        for way in (DSTRAIN, FUSED, LIGER, TRL):
            row[f"{way}, launches"] = figures[way][1] if way in figures else "-"
        smallest = min(peak for way, (peak, _) in figures.items() if way in (DSTRAIN, FUSED))
        row["MiB, least of dstrain / liger"] = f"{smallest / figures[LIGER][0]:.2f}"
        yield row
        print(row, file=sys.stderr, flush=True)


def measure_exactness() -> list[dict[str, Any]]:
    """Return relative differences from fp64 of the loss and the gradients, on a CPU."""
    from dstrain.models import heads
    from tools.triton_interpreter import use_interpreter

    use_interpreter()
    rows = []
    for task, dtype in product(("sft", "dpo"), (torch.float32, torch.bfloat16)):
        case = HeadCase(task, 2048, 64, 256, 0.5, dtype=dtype)
        exact = _compute(lambda inputs: run_scores(inputs, score_whole), HeadInputs(case, "cpu", torch.float64))
        for way in WAYS:
            if task == "dpo" and way == EXACT_LIGER:
                continue
            # The errors of a quarter of the targets would fit: all of them are computed again, as on a GPU.
            limit = round(case.tokens * case.share / 4 * case.vocabulary * dtype.itemsize / heads.KEPT_SHARE["cpu"])
            with mock.patch.dict(heads.MAX_CHUNK_BYTES, {"cpu": limit}):
                computed = _compute(WAYS[way], HeadInputs(case, "cpu"))
            names = ("loss", "gradient of the hidden states", "gradient of the weight")
            differences = {
                name: f"{float((value.double() - wanted).norm() / wanted.norm()):.1e}"
                for name, value, wanted in zip(names, computed, exact, strict=True)
            }
            rows.append({"loss of": task, "precision": str(dtype).removeprefix("torch."), "head": way, **differences})
    return rows


def _compute(run: Callable[[HeadInputs], torch.Tensor], inputs: HeadInputs) -> tuple[torch.Tensor, ...]:
    loss = run(inputs)
    loss.backward()
    assert inputs.hidden_states.grad is not None
    assert inputs.head.weight.grad is not None
    return loss.detach(), inputs.hidden_states.grad, inputs.head.weight.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    parser.add_argument("--exactness", action="store_true", help="only print the rows of exactness, as JSON")
    options = parser.parse_args()
    if options.exactness:
        print(json.dumps(measure_exactness()))
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("LD_PRELOAD", None)
    command = [sys.executable, "-m", "benchmarks.liger_heads", "--exactness"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    exactness = json.loads(done.stdout.splitlines()[-1])
    rows = list(measure_cases())
    record = format_certificate()
    write_table(f"{record}\n\n{table(rows)}\n\n{table(exactness)}", "benchmarks.liger_heads", options.to)


if __name__ == "__main__":
    main()
