"""Commands that train a part of a recorded run again, and look at it."""
