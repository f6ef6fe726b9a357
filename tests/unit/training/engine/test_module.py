"""A forward pass leaves sums with their weights and makes no host wait; the weight of a step divides its loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.batch import Batch, PackedGroup
from dstrain.config.schema import OptimConfig, RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import RunError
from dstrain.models.params import build_param_groups
from dstrain.tasks import LossInputs, make_task
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.module import StepAccumulator, _with_weights, total_step_weight
from dstrain.training.engine.torch import TorchEngine
from tests.host_reads import host_reads
from tests.parity.cases import made
from tests.tiny import tiny_recipe


@pytest.mark.parametrize("name", ["sft", "rm", "dpo", "kto"])
def test_no_number_of_the_host_is_copied_to_the_device(name: str, tmp_path: Path) -> None:
    """A copy of a number from ordinary memory waits for all work that a GPU was given before."""
    task = make_task(RunConfig.model_validate(tiny_recipe(name, tmp_path)))
    batch = make_batch(task.examples("train"), task.collate, [0, 1, 2], 0)
    objective = build_train_module(task)
    if task.loss_inputs.step_stats is not None:
        answers, totals = objective(batch, only="stats")
        batch = batch.with_tensors({**answers, **{key: total / weight for key, (total, weight) in totals.items()}})
    made: list[Any] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.as_tensor, torch.tensor):
                made.append(args)
            return function(*args, **(kwargs or {}))

    with Watch():
        _, metrics = objective(batch)
        sums = StepAccumulator()
        sums.add(torch.zeros(()), metrics)
        sums.add(torch.zeros(()), metrics)
    assert made == []
    own = [weight for _, weight in sums.metrics.values() if not isinstance(weight, torch.Tensor)]
    assert own == [2 * batch.weight] * len(own)
    assert own


def test_a_filler_weighs_nothing_on_the_host_and_on_the_device() -> None:
    batch = Batch(tensors={}, weight=2.0, samples=(1,))
    found = {"a": torch.tensor(3.0), "b": (torch.tensor(1), torch.tensor(4)), "c": (torch.tensor(5.0), 6.0)}
    assert {k: [float(one) for one in pair] for k, pair in _with_weights(found, batch).items()} == {
        "a": [3.0, 2.0], "b": [1.0, 4.0], "c": [5.0, 6.0],
    }  # fmt: skip
    assert not any(float(one) for pair in _with_weights(found, batch.as_filler()).values() for one in pair)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_that_weighs_nothing_names_its_samples(weight: float, tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(tiny_recipe("rm", tmp_path)))
    objective = build_train_module(task)
    optim = OptimConfig(name="sgd")
    engine = TorchEngine(objective, build_param_groups(objective.model, optim), optim, torch.device("cpu"))
    examples: Any = task.examples("train")
    batches = [replace(make_batch(examples, task.collate, [at], 0), weight=weight) for at in (5, 2)]
    before = [parameter.clone() for parameter in objective.parameters()]
    with pytest.raises(RunError, match=r"samples of one step, 2, 5, have a total weight of .*leave out samples"):
        engine.step([*batches, make_batch(examples, task.collate, [7], 0).as_filler()], 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, objective.parameters(), strict=True))


def test_a_step_whose_scores_are_not_finite_says_so(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(tiny_recipe("rm", tmp_path)))
    examples: Any = task.examples("train")
    batch = replace(make_batch(examples, task.collate, [5], 0), weight=math.nan)
    inputs = LossInputs(update_weight=lambda batch: batch)
    with pytest.raises(
        RunError, match=r"samples of one step, 5, .* of a reward model .* not finite; check its weights"
    ):
        total_step_weight([batch], SingleProcessWorld(), inputs)


def test_padding_is_counted_with_fillers_and_never_below_zero() -> None:
    padded = Batch(tensors={"input_ids": torch.zeros(2, 5)}, weight=2.0, samples=(0, 1), tokens=7)
    sums = StepAccumulator()
    sums.add(torch.tensor(0.0), {})
    result = sums.result([padded, padded.as_filler(), replace(padded, tokens=12)])
    assert (result.tokens, result.computed_tokens, result.padding_tokens) == (19, 30, 3 + 10 + 0)
    without = Batch(tensors={"residues": torch.zeros(2, 5)}, weight=2.0, samples=(0, 1), tokens=7)
    assert sums.result([without]).computed_tokens == 0


# Between a batch and the update of the weights, the host waits for a GPU only where the list below says so.
#
# A CPU never waits, so the operators are counted that would wait on a GPU; tests/gpu/test_syncs.py counts the waits.


SGD = {"optim": {"name": "sgd", "lr": 1.0, "clip": 0.0}}
OWN = {
    "rm": [],
    "dpo": [],
    "sft": [],
    "vlm": [],
    "docqa": [],
    "protein": [],
    "temporal": [],
    "kto": [],  # on a GPU it waits for the mean over a step, which all ranks need before its losses
}
"""Task -> waits of dstrain's own code before the norm of the gradient is read."""
ON_A_CPU = {
    "torch.tensor dstrain/device_copies.py:copy_to_device",  # on a GPU from pinned memory, without a wait
    "nonzero dstrain/models/heads.py:is_argmax",  # on a GPU an argmax
    "_local_scalar_dense dstrain/batch.py:to",  # of the mask, before it is copied to the device
}
"""Operators of dstrain's own code that it calls on a CPU only."""
NORM = "_local_scalar_dense dstrain/training/engine/torch.py:step"
OF_TRANSFORMERS = {
    "_ignore_causal_mask_sdpa",  # a mask is given: does it hide anything?
    "get_placeholder_mask",  # as many image tokens as features?
    "torch_compilable_check",
    "masked_scatter_backward",
}
"""Functions of transformers and torch that wait in every forward or backward pass."""


PADDED = {"batch": {"packing": False}}


@pytest.mark.parametrize(("task", "form"), [*((task, {}) for task in OWN), ("rm", PADDED), ("sft", PADDED)])
def test_a_step_waits_for_no_value_but_the_listed_ones(task: str, form: dict[str, Any]) -> None:
    run = made(task, "torch", 1, SGD | form)
    batches = [make_batch(run.examples, run.task.collate, [0, 1, 2], 0)]
    run.engine.step(batches, 0.0)  # buffers that are made once
    found = [where for where in host_reads(lambda: run.engine.step(batches, 0.0)) if where not in {NORM, *ON_A_CPU}]
    own = [where for where in found if not any(name in where for name in OF_TRANSFORMERS)]
    assert own == OWN[task]


def test_values_that_the_host_reads_are_found() -> None:
    values = torch.arange(4.0)
    assert [one.split()[0] for one in host_reads(lambda: float(values.sum()))] == ["_local_scalar_dense"]
    assert [one.split()[0] for one in host_reads(lambda: values[values > 1])] == ["index"]
    assert [one.split()[0] for one in host_reads(lambda: values.nonzero())] == ["nonzero"]
    assert not host_reads(lambda: torch.where(values > 1, values, 0.0).sum())


def noisy(tmp_path: Path, **batch: Any) -> Any:
    """Return a tiny sft module with NEFTune."""
    values = tiny_recipe("sft", tmp_path)
    values["model"] |= {"neftune_noise_alpha": 5.0}
    values["batch"] = {**values.get("batch", {}), **batch}
    return build_train_module(make_task(RunConfig.model_validate(values))).train()


def test_neftune_adds_the_noise_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    module = noisy(tmp_path, packing=False)
    embeddings = module.model.get_input_embeddings()
    ids = torch.arange(12).view(2, 6)
    plain = torch.nn.functional.embedding(ids, embeddings.weight)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with module.noise.in_batch(Batch(tensors=tensors, weight=1.0, samples=(0, 1))):
        torch.manual_seed(3)
        ours = embeddings(ids)
    embeddings.neftune_noise_alpha = 5.0
    torch.manual_seed(3)
    theirs = neftune_post_forward_hook(embeddings, None, plain)
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours, plain)


def test_neftune_counts_a_sequences_own_tokens_in_padded_and_packed_rows(tmp_path: Path) -> None:
    module = noisy(tmp_path)
    embeddings, width = module.model.get_input_embeddings(), module.model.config.hidden_size
    packed = Batch(tensors={"input_ids": torch.zeros(1, 12, dtype=torch.long)}, weight=1.0, samples=(0,),
                   groups=(PackedGroup(2, (1, 4)), PackedGroup(0, (5,))))  # fmt: skip
    with module.noise.in_batch(packed):
        limits = 5.0 / (module.noise._lengths * width).sqrt()
        noise = embeddings(packed.tensors["input_ids"]) - embeddings.weight[0]
    assert module.noise._lengths is None
    lengths = torch.tensor([6, 6, 3, 6, 6, 6, 6, 5, 5, 5, 5, 5])
    torch.testing.assert_close(limits[0], 5.0 / (lengths * width).sqrt())
    assert bool((noise[0].abs() <= limits[0][:, None] + 1e-6).all())
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    padded = Batch(tensors={"input_ids": torch.zeros_like(mask), "attention_mask": mask}, weight=1.0, samples=(0, 1))
    with module.noise.in_batch(padded):
        assert module.noise._lengths.tolist() == [[3.0], [2.0]]


def test_neftune_changes_training_alone(tmp_path: Path) -> None:
    module: Any = noisy(tmp_path)
    batch = module.task.collate([module.task.examples("train")[index] for index in range(2)])
    first, second = (float(module(batch)[0].detach()) for _ in range(2))
    assert first != second
    module.eval()
    assert float(module(batch)[0].detach()) == float(module(batch)[0].detach())
