"""What guesses the next tokens: a file for each way."""
