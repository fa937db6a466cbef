"""The chat page at `/`: its files, and what it asks the server for beside the dialects."""
