"""Host optimizers."""
