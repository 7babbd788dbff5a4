"""A page of running runs that is kept up to date."""
