"""Gives policies the training loader: a DynamicLoader as it is, a plain DataLoader wrapped. Here are Lightning's private names."""

from __future__ import annotations

import functools
import os
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader, _resolve_overfit_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_megatrain.callbacks.errors import PolicyError
from lightning_megatrain.datamodules.dynamic_loader import DynamicLoader
from lightning_megatrain.datamodules.sample_domains import DomainOf

_ATTACHED: WeakKeyDictionary[pl.Trainer, _Attachment] = WeakKeyDictionary()
_WRAPPED: WeakKeyDictionary[pl.Trainer, DynamicLoader] = WeakKeyDictionary()  # the last loader that was wrapped, with its decisions


class _Attachment:
    """What was put in the place of the user's training loader, and what its policies ask of it."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.domain: DomainOf | None = None
        self.names: list[str] = []  # of the policies, for messages
        self._source = trainer.fit_loop._data_source
        self._original = self._source.instance
        if self._source.is_module():
            given = getattr(self._original, self._source.name)
            self._own_attribute = vars(self._original).get(self._source.name)  # where the user has put one on the instance

            @functools.wraps(given)
            def train_dataloader() -> Any:
                loader = given()  # what goes wrong in it is the project's
                try:
                    return self._dynamic(trainer, loader)
                except Exception as error:
                    names = ", ".join(dict.fromkeys(self.names))
                    raise PolicyError(f"{names} failed at step {trainer.global_step}: {error}") from error

            # On the instance: shadows the method of the class and is deleted again.
            setattr(self._original, self._source.name, train_dataloader)
        else:
            self._source.instance = self._dynamic(trainer, self._original)

    def set_domain(self, domain: DomainOf) -> None:
        if self.domain is not None and self.domain != domain:
            raise ValueError(f"Two policies take the domain from different places: {self.domain!r} and {domain!r}. Give one `domain=`.")
        self.domain = domain
        passed = self._source.instance
        if isinstance(passed, DynamicLoader) and not passed.has_domains:
            passed.find_domains_by(domain)

    def detach(self) -> None:
        if self._source.is_module():
            vars(self._original).pop(self._source.name, None)
            if self._own_attribute is not None:
                setattr(self._original, self._source.name, self._own_attribute)
        else:
            self._source.instance = self._original

    def _dynamic(self, trainer: pl.Trainer, loader: Any) -> Any:
        if isinstance(loader, CombinedLoader | list | tuple | dict):
            raise TypeError(
                f"Data policies need one training loader, but `train_dataloader` gives a {type(loader).__name__}. Join the data in one "
                "`DynamicLoader({'name': dataset, ...}, batch_size=...)`, which mixes them in any proportions."
            )
        if isinstance(loader, DynamicLoader):
            if self.domain is not None and not loader.has_domains:
                loader.find_domains_by(self.domain)
            return loader
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"Data policies need a DataLoader over a map-style dataset, or a `DynamicLoader`, but `train_dataloader` gives a "
                f"{type(loader).__name__}. Return `DynamicLoader(dataset, batch_size=...)`."
            )
        if getattr(trainer, "overfit_batches", 0) > 0:
            combined = CombinedLoader(loader, "max_size_cycle")
            _resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
            loader = combined.flattened[0]
        # What Lightning would do to it now: give each rank its sampler, seed the workers.
        prepared = _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader)
        assert isinstance(prepared, DataLoader)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # as Lightning seeds its distributed sampler
        dynamic = DynamicLoader.from_dataloader(prepared, domain=self.domain, seed=seed, **_share(trainer))
        if trainer.global_step > 0 and (earlier := _WRAPPED.get(trainer)) is not None:
            dynamic.take_over(earlier)  # a further fit of the same Trainer goes on under the same decisions
        _WRAPPED[trainer] = dynamic
        return dynamic


def attach(trainer: pl.Trainer, domain: DomainOf | None, name: str) -> None:
    """Put a dynamic loader in the place of the training loader; to be called in a callback's ``setup``.

    Args:
        trainer: About to fit.
        domain: Where a plain DataLoader's samples have their domain; policies that give one must agree.
        name: Of the policy, for messages.

    Raises:
        MisconfigurationException: the Trainer reloads its loaders.
        ValueError: two policies give different domains.
        TypeError: the training loader cannot be wrapped; says what to return.
    """
    if reload := getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
        raise MisconfigurationException(
            f"reload_dataloaders_every_n_epochs={reload} makes a new training loader, which knows "
            "nothing of what a policy has decided. Leave it at 0: policies change the data without a new loader."
        )
    if trainer.fit_loop._combined_loader is not None and not isinstance(trainer.train_dataloader, DynamicLoader):
        trainer.fit_loop._combined_loader = None  # of a run without policies, such as the Tuner's
    attachment = _ATTACHED.get(trainer)
    if attachment is None:
        attachment = _ATTACHED[trainer] = _Attachment(trainer)
    attachment.names.append(name)
    if domain is not None:
        attachment.set_domain(domain)


def training_loader(trainer: pl.Trainer) -> DynamicLoader:
    """Return the dynamic loader that trains; known from ``on_train_start`` on."""
    loader = trainer.train_dataloader
    if not isinstance(loader, DynamicLoader):
        raise TypeError(
            f"The training loader is a {type(loader).__name__}, which was made before the policy could wrap it. Add policies to "
            "`Trainer(callbacks=...)`, not during training."
        )
    return loader


def refuse_overfitting(trainer: pl.Trainer, name: str) -> None:
    """Refuse ``overfit_batches`` beside a policy that changes which samples come next.

    Raises:
        MisconfigurationException: the Trainer trains on the same batches again and again.
    """
    if batches := getattr(trainer, "overfit_batches", 0):
        raise MisconfigurationException(
            f"overfit_batches={batches} trains on the same batches again and again, but {name} chooses others. Leave {name} out, or set "
            "limit_train_batches instead, for short epochs of what it chooses."
        )


def step_ends(trainer: pl.Trainer) -> bool:
    """Return whether the optimizer steps with this micro-batch."""
    return not trainer.fit_loop._should_accumulate()


def detach(trainer: pl.Trainer) -> None:
    """Give the user's training loader its place back."""
    if (attachment := _ATTACHED.pop(trainer, None)) is not None:
        attachment.detach()


def _share(trainer: pl.Trainer) -> dict[str, int]:
    """Return which part of the data this process takes."""
    kwargs = trainer.distributed_sampler_kwargs
    return {} if kwargs is None else {"rank": int(kwargs["rank"]), "world_size": int(kwargs["num_replicas"])}
