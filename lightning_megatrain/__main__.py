"""`python -m lightning_megatrain` is the `lightning-megatrain` command."""

from lightning_megatrain.cli import main

if __name__ == "__main__":
    main()
