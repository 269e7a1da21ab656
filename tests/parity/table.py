"""Which cases are run."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

PRECISIONS = ("32-true", "bf16-mixed")
ACCUMULATIONS = (1, 3)
CLIPPINGS = ("unclipped", "norm", "value")
ACCELERATORS = ("cpu", "emu")


@dataclass(frozen=True, order=True)
class Settings:
    """What a Trainer holds to in all steps: micro-batches a step, and how gradients are clipped."""

    accumulation: int
    clipping: str

    def __str__(self) -> str:
        return f"-{self.accumulation}-{self.clipping}"


@dataclass(frozen=True)
class Case:
    """One model in one precision on one device.

    Its steps take one micro-batch or several, and their gradients are clipped in every way or in none, in every combination; with
    `settings` all steps are alike.
    """

    model: str
    precision: str
    accelerator: str
    settings: Settings | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.precision}-{self.accelerator}{self.settings or ''}"


def every_case(models: Iterable[str]) -> list[Case]:
    """Four cases a model."""
    return [Case(*levels) for levels in product(models, PRECISIONS, ACCELERATORS)]


def every_setting(model: str) -> list[Case]:
    """24 cases."""
    settings = [Settings(*levels) for levels in product(ACCUMULATIONS, CLIPPINGS)]
    return [Case(model, *levels) for levels in product(PRECISIONS, ACCELERATORS, settings)]
