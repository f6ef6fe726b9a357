"""Parts of task temporal: its model, checks and export."""
