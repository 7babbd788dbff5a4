"""Crash-tests a user's own recipe: kills its runs in many ways; all must end the same."""
