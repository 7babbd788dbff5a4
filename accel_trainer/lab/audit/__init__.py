"""Checks whether a run happened as its folder says."""
