"""Searching over settings."""
