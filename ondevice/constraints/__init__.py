"""Text that obeys a JSON schema, a regular expression or a grammar, by masks of the tokens that may come."""
