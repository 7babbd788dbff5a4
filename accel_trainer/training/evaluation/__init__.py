"""Evaluations: their sets, metrics and results."""
