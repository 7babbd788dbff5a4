"""Sources of images: folders, Arrow tables, CIFAR's binary files, digits."""
