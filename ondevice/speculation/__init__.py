"""Speculative decoding: draft tokens are verified together, so the same text takes fewer forward passes."""
