"""Observations: what is measured, shown or sent beside a run. An error in one is said once, and never ends the run."""

# Not observations, and therefore not in here: metrics.jsonl and events.jsonl, which a resumed run reads and cuts back,
# and checkpoints.

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from dstrain.errors import describe_unexpected

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SKIPPED = 1023
"""Most calls of an observation that are left out after an error."""

_reported: set[str] = set()
"""Subjects whose first error was logged."""


@contextlib.contextmanager
def observing(subject: str) -> Iterator[None]:
    """Context that keeps an error of an observation from the run.

    The first error of each subject is a warning, later ones are for `logging.DEBUG`. The next call tries again.
    """
    try:
        yield
    except Exception as error:
        log_once(subject, error)


def log_once(subject: str, error: Exception, level: int = logging.WARNING) -> None:
    """Log why an observation is missing: at `level` the first time, then at DEBUG."""
    level = logging.DEBUG if subject in _reported else level
    _reported.add(subject)
    log.log(level, "%s failed (%s); the run continues without it", subject, describe_unexpected(error))


class Observation:
    """A value that is read again and again, where a failed read may take long.

    After an error the next call is left out, after a second one the next 3, then 7, up to MAX_SKIPPED: a value that
    is never there costs nothing, and one that returns is read again.
    """

    def __init__(self, subject: str, expected: Callable[[Exception], bool] = lambda error: False) -> None:
        """`expected`: returns True for an error of a platform that lacks the value, which is logged at DEBUG."""
        self._subject, self._is_expected = subject, expected
        self._errors, self._left_out = 0, 0

    def read(self, function: Callable[[], T]) -> T | None:
        """Return what the function returns; None after an error and while calls are left out."""
        if self._left_out:
            self._left_out -= 1
            return None
        try:
            value = function()
        except Exception as error:
            self._errors += 1
            self._left_out = min(2**self._errors - 1, MAX_SKIPPED)
            log_once(self._subject, error, logging.DEBUG if self._is_expected(error) else logging.WARNING)
            return None
        self._errors = 0
        return value
