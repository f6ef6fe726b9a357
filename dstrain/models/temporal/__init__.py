"""Temporal models: an encoder of time series, alone, with a classifier, or in front of a causal language model."""
