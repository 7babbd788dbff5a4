"""The command that makes finished models from the steps of a trunk."""
