"""RandomSelection: the baseline every selection must beat."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
from typing_extensions import override

from lightning_megatrain.callbacks.selection.selection import Selected, SelectionPolicy, check_seed


class RandomSelection(SelectionPolicy):
    """Chooses samples uniformly, without replacement, anew at every update.

    Args:
        seed: With the step, seeds the choice.
        **selection: Size, schedule and so on; see :class:`SelectionPolicy`.
    """

    def __init__(self, *, seed: int = 0, **selection: Any) -> None:
        super().__init__(**selection)
        self.seed = check_seed(seed)

    @override
    def select(self, trainer: pl.Trainer, module: pl.LightningModule, size: int) -> Selected:
        total = self.loader.num_samples or 0
        generator = np.random.default_rng([self.seed, trainer.global_step])
        return Selected(self.agree(trainer, lambda: generator.permutation(total)[:size].astype(np.int64)))
