"""Training: setup, loop, engine, checkpoints, health."""
