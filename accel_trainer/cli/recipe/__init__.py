"""The command line of a recipe: from flags to an exit code."""
