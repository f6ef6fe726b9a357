"""Launching: worker processes on this host and on others."""
