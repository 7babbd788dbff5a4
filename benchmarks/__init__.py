"""Measures the numbers of docs/costs.md.

`python -m benchmarks` runs all benchmarks; each file is also a command.
"""
