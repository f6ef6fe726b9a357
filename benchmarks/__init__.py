"""Benchmarks: ratios of time and memory, side by side in one run."""
