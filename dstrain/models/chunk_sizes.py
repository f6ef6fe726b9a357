"""Sizes of the parts in which heads, packed attention and MLPs compute; the planner counts with them, without torch."""

MAX_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Device type -> bytes of the fp32 logits of one chunk.

On a GPU chunks are larger, because launching the kernels of one takes the host about 0.4 ms.
"""
KEPT_SHARE = {"cpu": 3.0, "cuda": 0.25}
"""Device type -> of MAX_CHUNK_BYTES, for the errors of all targets. Errors that fit are kept for the gradient of the
weight; if they don't fit, the backward pass computes all of them again. A GPU keeps no more than one slice, since the
bytes that a step saves decide which batch fits."""
SLICE_SHARE = {"cpu": 0.5, "cuda": 0.25}
"""Device type -> of MAX_CHUNK_BYTES, for the logits of one matrix product: on a CPU they stay in the last-level cache."""
BLOCK_SHARE = {"cpu": 1 / 64, "cuda": 0.25}
"""Device type -> of MAX_CHUNK_BYTES, for fp32 logits that become errors at once: a CPU has them in its core's cache."""
QUERY_BLOCK = 128
"""Most queries of a block of packed attention on a CPU. A block computes all of its keys: shorter blocks compute fewer
hidden logits."""
SAVED_BYTES = 64 * 2**20
"""Most bytes of attention weights that a call keeps for the backward pass; beyond, they are computed again."""
TILE_TOKENS = 8192
"""Most tokens of a tile with `model.tiled_mlp: auto` and `true`: enough for the matrix products of any GPU."""
