"""Encoding: chat templates, token ids, loss masks, truncation."""
