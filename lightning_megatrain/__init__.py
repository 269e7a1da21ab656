"""Train a model that does not fit on the GPU from an ordinary Lightning project."""
