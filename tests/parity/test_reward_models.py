"""A step of dpo with reward models is one step at every stage, and online models are held like a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cells import SLOW
from tests.parity.test_step import SGD, distance
from tests.reward_models import export_reward_model
from tests.workers import Workers

SAMPLES = [4, 12, 3, 9, 15, 0, 7]
LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "online": (3, {"scoring": "online", "method": "safedpo", "scaling_weight": 0.5}, {}),
    "online, adapters": (2, {"scoring": "online", "method": "safedpo"}, LORA),
    "cached": (3, {"scoring": "cached", "method": "safedpo", "scaling_weight": 0.5}, {}),
}
"""Name -> ZeRO stage, options of safety, sections of the recipe."""


@pytest.mark.parametrize(
    "case", ["online", SLOW("online, adapters"), SLOW("cached")]
)  # unit/tasks/safety/test_reward_models
def test_a_step_with_reward_models_is_the_same_in_two_processes(
    case: str, one: Workers, two: Workers, tmp_path: Path
) -> None:
    stage, safety, sections = CASES[case]
    rms = {f"{name}_rm": str(export_reward_model(tmp_path, name)) for name in ("helpful", "harmless")}
    changes = {"moved": True, "options": {"safety": {**rms, **safety}}, **sections, **SGD}
    arguments: dict[str, Any] = {"task": "dpo", "samples": SAMPLES, "changes": changes}
    wanted = one("tests.parity.cases:one_step", kind="torch", accumulate=1, **arguments)[0]
    for found in two("tests.parity.cases:one_step", kind=f"zero{stage}", accumulate=2, **arguments):
        assert distance(found, wanted, "before") == 0, "the weights to begin with"
        assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-6, abs=1e-5)
        assert distance(found, wanted) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", [SLOW(2), 3])
def test_models_online_are_sharded_with_the_policy_and_stored_nowhere(stage: int, two: Workers, tmp_path: Path) -> None:
    safety = {"harmless_rm": str(export_reward_model(tmp_path)), "scoring": "online"}
    changes = {"options": {"safety": safety}}
    for found in two("tests.parity.cases:reward_models_held", kind=f"zero{stage}", changes=changes):
        assert found == {"sharded": stage == 3, "trained": 0, "in state": [], "in evaluation mode": True}
