"""The forward pass, written once over the ops of backends, and the state of a text between passes."""
