"""The same few steps, plain and streamed, give the same numbers: losses, gradients, parameters and buffers."""
