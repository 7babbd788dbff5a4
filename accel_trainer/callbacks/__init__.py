"""The built-in callbacks: metrics, progress bar, trackers, early stopping, export."""
