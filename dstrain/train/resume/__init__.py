"""Resume: what a checkpoint was trained on, compared with today's inputs."""
