"""Images: reading, indexing, augmentation, and the model's processor."""
