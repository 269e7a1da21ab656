"""Puts a DynamicLoader back in its place on resume where Lightning forgets it; an entry point gives this to every Trainer."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
from typing_extensions import override

_LOADER = "lightning_megatrain.datamodules.dynamic_loader"


class LoaderPlace(pl.Callback):
    """Loads the training loader's place from the checkpoint in the two cases in which Lightning does not. Has no state of its own."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        restore_place(trainer)


def loader_place() -> list[pl.Callback]:
    """Return the callback for a new Trainer; none in a program that has not imported DynamicLoader, which then notices nothing of it."""
    return [LoaderPlace()] if _LOADER in sys.modules else []


def restore_place(trainer: pl.Trainer) -> None:
    """Load the training loader's place from the checkpoint, unless Lightning or an earlier call has. For ``on_train_start``.

    When ``trainer.estimated_stepping_batches`` is read in ``configure_optimizers``, Lightning builds the loader before it reads the
    checkpoint and then forgets the loader's state (its issue 20550); of a checkpoint from the end of an epoch it never loads it.
    Other loaders than a DynamicLoader are left as Lightning leaves them.
    """
    loop = trainer.fit_loop
    loaded = sys.modules.get(_LOADER)
    if loaded is None or loop._combined_loader is None or not loop._combined_loader_states_to_load:
        return
    if any(isinstance(loader, loaded.DynamicLoader) for loader in loop._combined_loader.flattened):
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
