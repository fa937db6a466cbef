"""Stream adapters: their loss, their training, and the files they are written to."""
