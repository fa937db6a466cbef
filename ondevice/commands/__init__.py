"""The command line: one module per command, and modules that they share."""
