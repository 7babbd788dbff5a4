"""The command `accel-trainer doctor`: rules that find problems, and their report."""
