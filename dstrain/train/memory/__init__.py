"""Memory of a run: forecast, running out of it, and smaller micro-batches after that."""
