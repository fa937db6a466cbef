"""Prompt caches on disk: the state behind a prefix of tokens, found again by those who begin alike."""
