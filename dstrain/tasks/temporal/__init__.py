"""Task temporal: its task, its model, series and their readers."""
