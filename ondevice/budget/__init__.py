"""A model's memory, the plan that divides a budget, and memory pressure."""
