"""Sources of images: folders, Arrow tables, digits."""
