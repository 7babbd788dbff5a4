"""Signals, hangs, lack of memory, and the report of a failure."""
