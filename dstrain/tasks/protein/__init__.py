"""Task protein: its task, its model, and the readers of structure files."""
