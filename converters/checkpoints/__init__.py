"""One reader for each source format. Each returns a `base.Checkpoint`; `opening` chooses the reader."""
