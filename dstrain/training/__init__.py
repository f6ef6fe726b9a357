"""Training: start, plan, loop, engines, checkpoints, health."""
