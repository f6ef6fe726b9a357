"""Loading: sampler, collation, background loader."""
