"""Measurements of a model and its speed: profiles, ablations, comparisons of drafters."""
