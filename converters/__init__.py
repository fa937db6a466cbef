"""Converts checkpoints to bundles; `convert.convert` is the entry. Running a bundle needs none of
this code.
"""
