"""The chat page at `/`: its files, and the requests that it makes apart from the dialects."""
