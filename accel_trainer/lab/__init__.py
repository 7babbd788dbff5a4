"""Commands that train parts of a run again, or with faults, to answer a question about it."""
