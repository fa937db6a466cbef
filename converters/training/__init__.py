"""Training for a finished bundle: neuron order, predictors and stream adapters."""
