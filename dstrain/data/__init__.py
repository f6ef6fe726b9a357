"""Data pipeline: record sources, formats, images, encoding, the token cache and the loader."""
