"""What goes wrong beside the algorithm: signals, hangs, NaN, lack of memory."""
