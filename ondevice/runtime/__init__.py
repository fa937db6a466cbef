"""A loaded model: weights, key/value caches and budget, on one owner thread."""
