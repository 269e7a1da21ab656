"""What a policy may ask of a model."""
