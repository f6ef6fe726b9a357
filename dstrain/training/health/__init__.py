"""Health of a run: hangs, signals, non-finite steps, diagnosis."""
