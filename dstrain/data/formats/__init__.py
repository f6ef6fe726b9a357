"""Record formats: from published JSON records to typed values."""

from dstrain.old_paths import moved_names

__getattr__ = moved_names(__name__)
