"""Which neurons are multiplied for a token, and where they live in DRAM."""
