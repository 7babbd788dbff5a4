"""What goes wrong beside the algorithm: signals, hangs, lack of memory."""
