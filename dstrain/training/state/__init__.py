"""Train state in files: layout, reading, writing, resharding."""
