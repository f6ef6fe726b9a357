"""Time series: records, normalization, patches, and synthetic captioned curves."""
