"""Commands that use trained models: export, verify, predict, convert."""
