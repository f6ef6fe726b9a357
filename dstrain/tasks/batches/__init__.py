"""Batches of text tasks: padded or packed, with the images of their samples."""
