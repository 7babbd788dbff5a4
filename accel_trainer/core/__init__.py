"""What everything else speaks: types, errors, the plan of batches, randomness, files."""
