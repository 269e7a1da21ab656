"""What a DynamicLoader must be told of the Trainer: its place on resume where Lightning forgets it, and `overfit_batches`.

And what keeps that place right when a run is stopped twice in a row.

An entry point gives this to every Trainer.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

_LOADER = "lightning_megatrain.datamodules.dynamic_loader"


class LoaderPlace(pl.Callback):
    """Loads the training loader's place from the checkpoint in the two cases in which Lightning does not.

    Under `overfit_batches` it keeps the loader at its first batches, as Lightning does with a DataLoader. Has no state of its own.

    A resumed `ModelCheckpoint(every_n_train_steps=)` would save its first step again after one micro-batch, over the file that it resumed
    from: with accumulated gradients in mid-window, of which no checkpoint holds the gradients. It is told that this step is saved.

    Resumed from the end of an epoch after which no validation is due, under `max_steps`, Lightning would take one more batch of that epoch.
    The loader has none.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        restore_place(trainer)
        loaders = _dynamic_loaders(trainer)
        for saver in trainer.checkpoint_callbacks if loaders else ():
            if isinstance(saver, ModelCheckpoint) and not saver._last_global_step_saved:
                saver._last_global_step_saved = trainer.global_step
        epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        ended = epoch_loop.restarting and epoch_loop._num_ready_batches_reached()
        inside = epoch_loop.restarting and epoch_loop.batch_progress.current.ready > 0 and not ended
        # a checkpoint from within the last batch (`every_n_train_steps`) begins the next epoch at once
        at_end = ended and not epoch_loop.restarted_on_train_batch_end
        for loader in loaders:
            loader.same_every_epoch = getattr(trainer, "overfit_batches", 0) > 0  # set on it by name
            loader.inside_epoch = inside
            if ended:
                loader.end_epoch()
            loader.nothing_left = at_end and fetcher is not None and not epoch_loop._should_check_val_fx(fetcher)


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
    if loop._combined_loader_states_to_load and _dynamic_loaders(trainer):
        assert loop._combined_loader is not None
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []


def _dynamic_loaders(trainer: pl.Trainer) -> list[Any]:
    loaded, combined = sys.modules.get(_LOADER), trainer.fit_loop._combined_loader
    return [] if loaded is None or combined is None else [x for x in combined.flattened if isinstance(x, loaded.DynamicLoader)]
