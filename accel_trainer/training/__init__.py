"""The algorithm: the loop, the optimizer step, evaluation, tasks and metrics."""
