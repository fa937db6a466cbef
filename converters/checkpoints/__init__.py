"""One reader per source format; each gives a `base.Checkpoint`. `opening` tells them apart."""
