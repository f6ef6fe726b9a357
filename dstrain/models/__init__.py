"""Models: loading, heads, adapters, parameters, checks."""
