"""The forward pass, written once over the backend ops, and its state."""
