"""Recipes on the command line: where they are found and how options change them."""
