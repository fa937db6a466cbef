"""Predictors of which feed-forward neurons fire: recorded, fitted, calibrated and written."""
