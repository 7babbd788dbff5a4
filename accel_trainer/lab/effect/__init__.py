"""Finds which of the settings that differ between two runs change the result."""
