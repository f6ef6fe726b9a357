"""Work that a command does in launched processes, and its temporary folders."""
