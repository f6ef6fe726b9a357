"""Lines of a memory plan: states, activations, head, images, host."""
