"""Observers of a run. They see everything and assign nothing."""
