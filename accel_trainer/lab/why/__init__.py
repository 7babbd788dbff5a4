"""Finds where two runs that should be equal begin to differ, and why."""
