"""Images: reading, index, augmentation, and the model's processor."""
