"""ReplaySelection: the choices of an earlier run, at the same steps."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from typing_extensions import override

from lightning_megatrain.callbacks.decision_log import read_decisions
from lightning_megatrain.callbacks.selection.selection import Selected, SelectionPolicy


class ReplaySelection(SelectionPolicy):
    """Repeats a selection policy's recorded choices at the same steps, without its cost; with the same loader that gives the same samples.

    Args:
        path: The recorded folder, ``<log_dir>/policies/<name>/decisions``.
        name: As in :class:`~lightning_megatrain.callbacks.Policy`.
        record: As in :class:`~lightning_megatrain.callbacks.Policy`.

    Raises:
        FileNotFoundError: there are no decisions.
        ValueError: they name no samples.
    """

    def __init__(self, path: str | Path, *, name: str | None = None, record: bool = True) -> None:
        super().__init__(size=1.0, name=name, record=record)
        decisions = read_decisions(path)
        if decisions["index"].null_count == len(decisions):
            raise ValueError(f"The decisions in {path} name no samples: they are not a selection policy's.")
        steps, self._index = decisions["step"].to_numpy(), decisions["index"].to_numpy()
        self._score = None if decisions["score"].null_count else decisions["score"].to_numpy()
        self._rows = {int(step): np.flatnonzero(steps == step) for step in np.unique(steps)}

    @override
    def due(self, step: int) -> bool:
        return step in self._rows

    @override
    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().prepare(trainer, module)
        if self._index.max() >= (self.loader.num_samples or 0):
            raise ValueError(f"The decisions name sample {self._index.max()}, but the training data has {self.loader.num_samples}.")

    @override
    def select(self, trainer: pl.Trainer, module: pl.LightningModule, size: int) -> Selected:
        rows = self._rows[trainer.global_step]
        return Selected(self._index[rows].astype(np.int64), None if self._score is None else self._score[rows])
