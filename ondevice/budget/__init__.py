"""What a model costs in memory, how a budget is divided, and what memory pressure leaves of it."""
