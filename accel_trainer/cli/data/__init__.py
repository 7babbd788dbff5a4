"""Commands that use datasets of photos: data, pack."""
