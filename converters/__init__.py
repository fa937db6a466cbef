"""Checkpoint to bundle: `convert.convert` is the entry; nothing here is needed to run a bundle."""
