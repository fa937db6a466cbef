"""The drafters, one per file."""
