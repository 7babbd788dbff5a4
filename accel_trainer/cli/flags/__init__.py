"""The settings of a recipe as flags and YAML files: read, explained, and corrected."""
