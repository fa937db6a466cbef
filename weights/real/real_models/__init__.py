"""Real models: which packages bring them, where their files are kept, how they are fetched."""
