"""Loads models and runs them: weights, key/value caches and budget of a model, on one owner thread."""
