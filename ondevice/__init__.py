"""Run a language model that is larger than the memory you give it."""
