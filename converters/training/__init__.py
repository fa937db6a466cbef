"""Training for a finished bundle: neuron order, thresholds, predictors and stream adapters."""
