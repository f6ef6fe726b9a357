"""Records and batches of text tasks: parsing, padded or packed rows, the images of samples."""
