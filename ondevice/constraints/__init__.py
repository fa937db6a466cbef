"""Constraints on a text: a JSON schema, a regular expression or a grammar, enforced by masks of allowed
tokens.
"""
