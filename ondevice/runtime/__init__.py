"""A loaded model: its weights, its key/value caches and its budget, under one owner thread."""
