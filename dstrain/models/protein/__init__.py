"""The model of task protein: a transformer encoder and decoder over residues and their backbone."""
