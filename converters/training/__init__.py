"""What is trained for a finished bundle: neuron order, thresholds, predictors and stream adapters."""
