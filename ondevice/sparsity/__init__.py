"""Decides which neurons are multiplied for a token, and holds them in DRAM."""
