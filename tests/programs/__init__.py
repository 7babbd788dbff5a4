"""Programs drawn from a seed, each killed and compared with one that nobody killed."""
