"""Commands that use data sets of photos: data, pack."""
