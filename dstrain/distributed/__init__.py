"""Process groups: the world, its collectives, and a log of them."""
