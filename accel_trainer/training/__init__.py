"""The training loop, the optimizer step, evaluation, tasks and metrics."""
