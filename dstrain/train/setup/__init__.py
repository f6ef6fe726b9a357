"""Construction of a run: its plan, its folder, its preset and its parts."""
