"""Commands that inspect and repeat runs."""
