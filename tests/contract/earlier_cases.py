"""Worker functions of the tests of what earlier versions wrote."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from tests.resume.cases import run


def go_on(folder: str, task: str) -> dict[str, Any]:
    """Continue the run of a task in a folder that an earlier version wrote, with a token cache in it."""
    with mock.patch.dict(os.environ, DSTRAIN_CACHE=f"{folder}/cache"):
        return run(recipe=f"{folder}/{task}/recipe.yaml", run_dir=f"{folder}/{task}/run")
