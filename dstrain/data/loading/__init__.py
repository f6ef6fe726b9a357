"""Loading: sampler, micro-batches, rows and the background loader."""
