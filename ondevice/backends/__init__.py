"""The backends that run the forward pass: the protocol of their ops (`base`), and its implementations."""
