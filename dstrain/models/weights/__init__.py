"""Weight files: names, shapes, values, and construction on the meta device."""
