"""Checkpoints of the Hugging Face hub, read over the network as if they were folders."""
