"""One step is one step: however the samples are split over processes, micro-batches and ZeRO stages."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.cells import SLOW
from tests.model_families import family
from tests.workers import Workers

SGD = {"optim": {"name": "sgd", "lr": 1000.0, "clip": 0.05}}
SAMPLES = {"even": list(range(8)), "uneven": [5, 0, 9, 31, 2, 44, 7], "fewer than chunks": [3, 17, 40]}


def distance(found: dict[str, Any], wanted: dict[str, Any], key: str = "gradient") -> float:
    """Relative distance over all parameters."""
    assert found[key].keys() == wanted[key].keys()
    square = lambda values: sum(float((value**2).sum()) for value in values)  # noqa: E731
    return float(np.sqrt(square(found[key][n] - wanted[key][n] for n in wanted[key]) / square(wanted[key].values())))


@pytest.fixture(scope="module")
def definition(one: Workers) -> Any:
    """What plain PyTorch does with all samples in one batch."""
    found: dict[str, Any] = {}

    def of(samples: str, task: str = "rm", **more: Any) -> Any:
        key = f"{samples} {task} {more}"
        if key not in found:
            changes = SGD | more
            found[key] = one(
                "tests.parity.cases:one_step",
                task=task,
                kind="torch",
                samples=SAMPLES[samples],
                accumulate=1,
                changes=changes,
            )[0]
        return found[key]

    return of


ALSO_FAST = ((1, 0, 4, "uneven"), (1, 3, 4, "uneven"), (2, 3, 4, "fewer than chunks"))


@pytest.mark.parametrize(
    ("processes", "stage", "accumulate", "samples"),
    # Uneven samples over two processes, in four micro-batches, at each stage stand for the rest.
    [
        one if (one[0] == 2 and one[2:] == (4, "uneven")) or one in ALSO_FAST else SLOW(*one)
        for one in product((1, 2), range(4), (1, 4), SAMPLES)
    ],
)
def test_a_step_is_the_same_however_it_is_split(
    processes: int, stage: int, accumulate: int, samples: str, definition: Any, request: pytest.FixtureRequest
) -> None:
    workers = request.getfixturevalue({1: "one", 2: "two"}[processes])
    wanted = definition(samples)
    found = workers(
        "tests.parity.cases:one_step",
        task="rm",
        kind=f"zero{stage}",
        samples=SAMPLES[samples],
        accumulate=accumulate,
        changes=SGD,
    )
    for of_rank in found:
        assert distance(of_rank, wanted, "before") == 0, "the weights to begin with"
        assert of_rank["sums"] == pytest.approx(wanted["sums"], rel=1e-6, abs=1e-6)
        assert of_rank["norm"] == pytest.approx(wanted["norm"], rel=1e-6)
        assert distance(of_rank, wanted) <= 1e-6


def test_accumulation_in_plain_torch_is_the_definition_too(one: Workers, definition: Any) -> None:
    found = one(
        "tests.parity.cases:one_step", task="rm", kind="torch", samples=SAMPLES["uneven"], accumulate=4, changes=SGD
    )[0]
    assert distance(found, definition("uneven")) <= 1e-6


@pytest.mark.parametrize("stage", [0, SLOW(1), 2, 3])  # stages 1 and 2 are one class of DeepSpeed
def test_frozen_parts_and_groups_are_the_same_at_every_stage(stage: int, two: Workers, definition: Any) -> None:
    own = {
        "optim": SGD["optim"] | {"groups": {"score": {"lr": 10.0}}},
        "model": {"freeze": ["*.embed_tokens", "model.layers.0"]},
    }
    wanted = definition("uneven", **own)
    for found in two(
        "tests.parity.cases:one_step",
        task="rm",
        kind=f"zero{stage}",
        samples=SAMPLES["uneven"],
        accumulate=2,
        changes=SGD | own,
    ):
        assert distance(found, wanted) <= 1e-6
        assert not found["gradient"]["model.embed_tokens.weight"].any(), "frozen"
        assert found["gradient"]["score.weight"].any(), "trained"


@pytest.mark.parametrize("stage", [SLOW(0), SLOW(1), 2, 3])  # stages 1 and 2 are one class of DeepSpeed
@pytest.mark.parametrize(
    "change", [{}, {"gradient_checkpointing": True, "lora": {"rank": 4}}], ids=["weights", "adapters"]
)
def test_the_loss_of_routers_is_the_same_at_every_stage(
    stage: int, change: dict[str, Any], one: Workers, two: Workers
) -> None:
    """On the same micro-batches, since the loss of the routers is not a sum over tokens."""
    model = {"config": family("mixtral"), "router_aux_loss_coef": 2.0, "gradient_checkpointing": False, **change}
    given = {"task": "sft", "samples": SAMPLES["uneven"], "changes": {**SGD, "model": model}}
    (wanted,) = one("tests.parity.cases:one_step", kind="torch", accumulate=2, **given)
    for found in two("tests.parity.cases:one_step", kind=f"zero{stage}", accumulate=1, **given):
        assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-5)
        assert distance(found, wanted) <= 1e-5


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_leaves_rotary_frequencies_exact(stage: int, two: Workers) -> None:
    for found in two("tests.parity.cases:rotary_frequencies", kind=f"zero{stage}"):
        assert found
        assert set(found) == {"torch.float32 True"}
