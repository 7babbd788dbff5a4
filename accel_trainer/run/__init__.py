"""From a command line to a trainer: config, build, resume, provenance."""
