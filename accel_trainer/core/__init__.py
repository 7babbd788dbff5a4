"""What all other packages share: types, errors, batch arithmetic, randomness, files."""
