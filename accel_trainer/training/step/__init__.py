"""One optimizer step: its gradients, its checks, and whose turn it is."""
