"""Base classes that tasks share."""
