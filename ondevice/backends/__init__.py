"""The backends under the one forward pass: the op protocol (`base`) and its implementations."""
