"""The commands of `accel-trainer`, one file each, imported only when called."""
