"""All rules, applied to a run."""

from __future__ import annotations

from dstrain.report.page.learning_rules import LEARNING_RULES
from dstrain.report.page.resource_rules import OUTCOME_RULES, RESOURCE_RULES
from dstrain.report.page.verdict import RunSummary, Verdict

_ORDER = {"bad": 0, "warning": 1, "good": 2, "info": 2}


def evaluate_rules(run: RunSummary) -> list[Verdict]:
    """Return the verdicts: first how the run ended, then the others, the worst first."""
    found = [verdict for rule in (*LEARNING_RULES, *RESOURCE_RULES) for verdict in rule(run)]
    return [
        *(verdict for rule in OUTCOME_RULES for verdict in rule(run)),
        *sorted(found, key=lambda one: _ORDER[one.level]),
    ]
