"""What a run will do, and the time and memory that it takes on this machine."""
