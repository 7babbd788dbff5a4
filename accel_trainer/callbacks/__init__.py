"""What observes a run: records, progress, trackers, early stopping."""
