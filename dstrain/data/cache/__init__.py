"""Token cache: built once, memory-mapped, read by every rank."""
