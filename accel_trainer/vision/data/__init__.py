"""Turns images into batches: decoding, cache, loaders."""
