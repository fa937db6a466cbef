"""Runs one model on several machines, each of which has a range of its layers."""
