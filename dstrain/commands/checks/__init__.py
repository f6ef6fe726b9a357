"""Checks that commands run before they start processes or read a folder."""
