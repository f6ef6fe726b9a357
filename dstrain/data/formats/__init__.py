"""Record formats: from published JSON records to typed values."""
