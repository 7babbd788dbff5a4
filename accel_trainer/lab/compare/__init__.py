"""Whether one setting is better than another, or whether it is the seed."""
