"""What only watches, refuses or explains: a run without these checks trains the same bits."""
