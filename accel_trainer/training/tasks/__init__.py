"""What a model is trained for: a loss for each sample, and what metrics need."""
