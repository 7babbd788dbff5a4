"""Which of the settings in which two runs differ change the result."""
