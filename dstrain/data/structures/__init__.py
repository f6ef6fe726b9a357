"""Protein structures: chains read from files, their residues hidden for training, and splits without near copies."""
