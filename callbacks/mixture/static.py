"""StaticMixture: the same shares all the time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatrain.callbacks.mixture.mixture import MixturePolicy
from lightning_megatrain.datamodules.shares import check_weights


class StaticMixture(MixturePolicy):
    """Sets shares once and leaves them, exact over each window of samples.

    Args:
        proportions: A weight for every domain; the path of a JSON file with them, such as the ``average_shares.json`` that DoReMi
            leaves; or None for equal shares.
        warmup_steps: When they are set; before that the loader's own order holds.
        **policy: Domain, name and so on; see :class:`~lightning_megatrain.callbacks.Policy`.

    Raises:
        TypeError: the proportions are no mapping.
        ValueError: a weight is negative or not finite, or all are zero.
    """

    def __init__(self, proportions: dict[str, float] | str | None = None, *, warmup_steps: int = 0, **policy: Any) -> None:
        super().__init__(warmup_steps=warmup_steps, **{"every_n_steps": 0, **policy})
        self.proportions = json.loads(Path(proportions).read_text()) if isinstance(proportions, str) else proportions
        check_weights("proportions", self.proportions)

    @override
    def mix(self, trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, float]:
        return dict.fromkeys(self.loader.domains, 1.0) if self.proportions is None else self.proportions
