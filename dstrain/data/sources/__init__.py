"""Sources: records by index, from files and from the Hub."""
