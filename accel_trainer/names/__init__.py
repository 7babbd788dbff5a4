"""What settings are called: as flags, as keywords in Python, and in other toolkits."""
