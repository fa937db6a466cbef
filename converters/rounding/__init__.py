"""Rounding to 4 to 6 bits by what a text shows of every matrix's inputs."""
