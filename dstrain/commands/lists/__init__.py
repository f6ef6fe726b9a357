"""Lists to choose from: recipes, presets, tasks, and the checkpoints of a run."""
