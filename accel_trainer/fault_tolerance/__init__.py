"""Signals, hangs, and the report of a failure."""
