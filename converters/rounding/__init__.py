"""Rounding to 4 to 6 bits with error feedback, which needs the inputs of every matrix for a text."""
