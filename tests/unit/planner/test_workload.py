"""The largest forward pass of a step, as the planner takes it."""

from __future__ import annotations


def test_blocks_of_attention_are_those_of_the_kernel() -> None:
    from dstrain.models.attention import by_group
    from dstrain.planner import workload

    assert (workload.QUERY_BLOCK, workload.SAVED_BYTES) == (by_group.QUERY_BLOCK, by_group.SAVED_BYTES)


def test_a_query_computes_the_keys_of_its_block() -> None:
    from dstrain.planner.workload import mean_block_keys

    assert mean_block_keys(100) == 100
    assert mean_block_keys(128) == 128
    assert mean_block_keys(300) == (128 * 128 + 128 * 256 + 44 * 300) / 300
    assert mean_block_keys(0) == 0
