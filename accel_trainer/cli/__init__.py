"""The command `accel-trainer`: one module per command."""
