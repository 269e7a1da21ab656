"""The streaming engine: knows torch, knows nothing of Lightning."""
