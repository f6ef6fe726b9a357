"""Parameters of model families, derived from config.json."""
