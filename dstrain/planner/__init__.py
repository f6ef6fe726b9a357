"""Memory planner: what a run needs per GPU, host and disk, counted before anything is started. Imports no torch."""
