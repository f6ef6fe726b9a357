"""The report page of runs: one self-contained HTML file."""
