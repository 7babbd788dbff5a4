"""From samples to the batches of a step."""
