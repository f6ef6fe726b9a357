"""Loading of the model that a command works on."""
