"""A file call of a save fails: the run goes on, or ends with what was whole before."""

from __future__ import annotations

import shutil

import pytest

from tests.faults.file_errors import ENDED, FROM_HERE_ON, ONCE, SECOND_TRY, sweep_all

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def test_a_file_call_of_a_save_that_fails_loses_nothing() -> None:
    """A sample; `python -m tests.faults.file_errors` tries all calls and errors."""
    calls, (passing, lasting) = sweep_all(61, (("ESTALE", ONCE), ("EMFILE", FROM_HERE_ON)))
    assert calls > 250
    assert passing.faults + lasting.faults == []
    assert passing.outcomes[SECOND_TRY]
    assert lasting.outcomes[ENDED]
