"""Data: files to records, records to examples, examples to batches in a planned order."""
