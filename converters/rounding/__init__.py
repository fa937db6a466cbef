"""Rounding to 4 bits by what a text shows of every matrix's inputs."""
