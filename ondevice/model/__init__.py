"""The forward pass, written once over the backend ops, and the state it carries."""
