"""Engines: one training step, on DeepSpeed or in plain torch."""
