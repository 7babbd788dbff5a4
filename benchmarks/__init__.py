"""What the README's numbers come from. `python -m benchmarks` runs all; every file is also a command of its own."""
