"""The parts of `python -m benchmarks.gpu`: each measures or checks one thing, and needs no network,
pip or make."""
