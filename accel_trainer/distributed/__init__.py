"""Processes and devices: how a run is launched, set up and reduced over."""
