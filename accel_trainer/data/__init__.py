"""Loaders: from samples to the batches of a step."""
