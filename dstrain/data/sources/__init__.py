"""Record sources: files and Hub datasets, read by index."""
