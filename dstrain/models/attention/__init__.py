"""Attention of packed batches, and the choice of an attention implementation."""
