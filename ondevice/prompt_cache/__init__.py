"""Prompt caches on disk: states after prefixes of tokens, reused by texts that begin with the same tokens."""
