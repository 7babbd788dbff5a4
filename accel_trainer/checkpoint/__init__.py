"""Checkpoints: saving, verifying and loading the state of a run; no load can run code."""
