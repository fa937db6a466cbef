"""What a model does and how fast it runs: profiles, ablations, drafters compared."""
