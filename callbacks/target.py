"""The data a policy aims at: found by name, and compared with what the run is judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Target:
    """Samples of one task.

    Attributes:
        dataset: Map-style.
        collate_fn: Makes a batch of its samples; None: the training loader's.
    """

    dataset: Any
    collate_fn: Any = None


def find_target(target: Any, trainer: pl.Trainer) -> dict[str, Target]:
    """Find the target data, by task.

    Args:
        target: A map-style dataset, a DataLoader over one, a mapping of task names to these, or the name of an attribute (or of a
            method without
            arguments) of the datamodule or the LightningModule that holds or returns one of them. ``"val_datasets.code"`` goes on
            into a mapping or object.
        trainer: Whose datamodule and module are asked.

    Raises:
        ValueError: there is nothing of that name.
        TypeError: it is no map-style data.
    """
    found = _by_name(target, trainer) if isinstance(target, str) else target
    tasks = found if isinstance(found, Mapping) else {"target": found}
    if not tasks:
        raise ValueError("The target holds no task.")
    return {str(name): _as_target(name, data) for name, data in tasks.items()}


def warn_if_validated_on(policy: Any, trainer: pl.Trainer) -> None:
    """Warn once if a policy's target is also a validation set that a callback monitors: it would choose what flatters the score."""
    target = getattr(policy, "target", None)
    monitors = [c.monitor for c in getattr(trainer, "callbacks", []) if getattr(c, "monitor", None)]
    if target is None or not monitors or getattr(policy, "_warned_of_target", False):
        return
    loaders = trainer.val_dataloaders
    loaders = list(loaders.values()) if isinstance(loaders, Mapping) else loaders if isinstance(loaders, list | tuple) else [loaders]
    validated = [getattr(loader, "dataset", None) for loader in loaders]
    same = [name for name, task in find_target(target, trainer).items() if any(_same(task.dataset, v) for v in validated)]
    if same:
        policy._warned_of_target = True
        rank_zero_warn(
            f"{policy.name} aims at data that a validation loader also uses ({', '.join(same)}), and {monitors[0]!r} is monitored. The "
            "training data is then chosen "
            "for the very score that checkpoints or stopping are judged by: keep a part of the data for one of them only."
        )


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return False
    fingerprint = getattr(a, "_fingerprint", None)
    return a is b or (isinstance(fingerprint, str) and fingerprint == getattr(b, "_fingerprint", None))


def _by_name(name: str, trainer: pl.Trainer) -> Any:
    head, *rest = name.split(".")
    holders = [h for h in (getattr(trainer, "datamodule", None), trainer.lightning_module) if h is not None]
    for holder in holders:
        if hasattr(holder, head):
            found = getattr(holder, head)
            found = found() if callable(found) and not hasattr(found, "__getitem__") else found
            for part in rest:
                found = found[part] if isinstance(found, Mapping) else getattr(found, part)
            return found
    names = " or ".join(type(h).__name__ for h in holders)
    raise ValueError(
        f"There is no target {name!r}: give {names} an attribute or method of that name that holds a map-style dataset (or a mapping of "
        "tasks to datasets)."
    )


def _as_target(name: Any, data: Any) -> Target:
    if isinstance(data, DataLoader):
        data = Target(data.dataset, data.collate_fn)
    elif not isinstance(data, Target):
        data = Target(data)
    if not hasattr(data.dataset, "__getitem__") or not hasattr(data.dataset, "__len__") or not len(data.dataset):
        raise TypeError(
            f"The target {name!r} ({type(data.dataset).__name__}) must be a map-style dataset (`__getitem__` and `__len__`) with at "
            "least one sample."
        )
    return data
