"""Engines: one training step on DeepSpeed."""
