"""A bar for page-locking, which takes about a second for every few gigabytes."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from tqdm.auto import tqdm


@contextmanager
def locking_progress(module: LightningModule, device: torch.device) -> Generator[Callable[[int], None], None, None]:
    """Gives a function to call with the bytes of each range that was locked; the bar shows for a gigabyte and more."""
    nbytes = sum(p.nbytes for p in module.parameters())
    with tqdm(
        total=nbytes, desc="Page-locking host memory", unit="B", unit_scale=True, disable=device.type == "cpu" or nbytes < 1 << 30
    ) as bar:

        def progress(done: int) -> None:
            bar.update(done)

        yield progress
