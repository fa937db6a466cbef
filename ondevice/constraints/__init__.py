"""Text that satisfies a JSON schema, a regular expression or a grammar, by masks of allowed tokens."""
