"""Settings of Pillow that are changed while an image is decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock, _active, _before = threading.Lock(), 0, False


@contextmanager
def disallow_truncation() -> Iterator[None]:
    """Make Pillow raise for truncated files inside the block, in all threads.

    With ImageFile.LOAD_TRUNCATED_IMAGES, which other code may have set, it would fill the missing
    pixels. The last thread to leave restores the setting.
    """
    global _active, _before
    from PIL import ImageFile

    with _lock:
        if not _active:
            _before = ImageFile.LOAD_TRUNCATED_IMAGES
        _active += 1
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if not _active:
                ImageFile.LOAD_TRUNCATED_IMAGES = _before
