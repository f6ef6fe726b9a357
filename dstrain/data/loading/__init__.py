"""Loading: sampler, collation and the background loader."""
