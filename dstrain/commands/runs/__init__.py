"""Commands on run folders: the state of a run, and the report page."""
