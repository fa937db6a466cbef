"""Rounding to 4 to 6 bits with error feedback, by a text's inputs of every matrix."""
