"""What moves the weights: optimizers, schedules, averages."""
