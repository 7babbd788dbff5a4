"""Measures the README's numbers.

`python -m benchmarks` runs all benchmarks; each file is also a command.
"""
