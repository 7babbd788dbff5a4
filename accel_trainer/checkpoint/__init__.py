"""State to disk and back, so that no checkpoint is lost and none can run code."""
