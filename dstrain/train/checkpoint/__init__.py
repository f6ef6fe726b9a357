"""Checkpoints: writing, choosing, committing, disk space."""
