"""A loaded model: its weights, its sequences and its budget, under one owner thread."""
