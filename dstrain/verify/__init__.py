"""Checks of a shrunk model: what dstrain promises for its family, each a function that returns a result."""
