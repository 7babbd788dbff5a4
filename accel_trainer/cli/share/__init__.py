"""Commands that use trained models: export, verify, evaluate, predict."""
