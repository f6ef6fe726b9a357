"""Classes of the recipe's log.sinks: found by import path or file, and checked before a run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, UsageError, describe_fault, suggest_name
from dstrain.tasks.common.registry import import_task_file

KEY = "log.sinks"


def find_sink_class(name: str) -> Any:
    """Return the class of a `UserSink` that `log.sinks` names, `module.Class` or `FILE.py:Class`. Raises UsageError."""
    place, _, class_name = name.rpartition(":" if ".py:" in name else ".")
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise UsageError(Fault(KEY, f"{name}: there is no file {place}", "correct the path"))
    try:
        module = import_task_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        problem = f"{name}: {place} cannot be imported ({describe_fault(error)})"
        fix = "correct the name, add its folder to PYTHONPATH, or put the module next to the recipe"
        raise UsageError(Fault(KEY, problem, fix)) from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise UsageError(Fault(KEY, f"{name}: {place} has no {class_name}", suggest_name(class_name, classes)))
    if not isinstance(found, type):
        raise UsageError(Fault(KEY, f"{name}: is a {type(found).__name__}, not a class", "name a class"))
    if missing := [method for method in ("write", "close") if not callable(getattr(found, method, None))]:
        fix = "write it; docs/metrics.md has the methods of a sink"
        raise UsageError(Fault(KEY, f"{name}: has no method {missing[0]}", fix))
    return found


def check_sinks(names: Sequence[str]) -> None:
    """Raise UsageError for a class that cannot be found, or whose own `check` refuses this machine."""
    for name in names:
        check = getattr(find_sink_class(name), "check", None)
        try:
            if check is not None:
                check()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            fix = "see its documentation, or remove it"
            raise UsageError(Fault(KEY, f"{name}: check() failed ({describe_fault(error)})", fix)) from error
