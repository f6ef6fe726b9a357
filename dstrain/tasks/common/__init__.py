"""Base classes and losses that tasks share."""
