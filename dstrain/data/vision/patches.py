"""Patch of Pillow: truncated images are refused, whatever another package has set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dstrain.patching import check_version

TESTED_PILLOW = ("10", "14")
"""First version tested, and the first one not tested."""
_lock = threading.Lock()
_num_readers, _value_before = 0, False


@contextmanager
def raise_on_truncated_images() -> Iterator[None]:
    """Have Pillow raise OSError for a truncated image inside, in any number of threads.

    Where LOAD_TRUNCATED_IMAGES is set, as datasets and some training scripts do, Pillow fills the rest with grey. The
    setting is global, so the first reader saves it and the last one restores it.
    """
    global _num_readers, _value_before
    from PIL import ImageFile

    check_version("pillow", *TESTED_PILLOW)
    with _lock:
        if not _num_readers:
            _value_before = ImageFile.LOAD_TRUNCATED_IMAGES
        _num_readers += 1
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _lock:
            _num_readers -= 1
            if not _num_readers:
                ImageFile.LOAD_TRUNCATED_IMAGES = _value_before
