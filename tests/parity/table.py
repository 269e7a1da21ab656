"""Which cases are run, and where equality is not bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from tests.parity.subject import Subject

PRECISIONS = ("32-true", "bf16-mixed")
ACCUMULATIONS = (1, 3)
CLIPPINGS = ("unclipped", "norm", "value")
ACCELERATORS = ("cpu", "emu")


@dataclass(frozen=True, order=True)
class Case:
    """One cell of the cross product."""

    model: str
    precision: str
    accumulation: int
    clipping: str
    accelerator: str

    def __str__(self) -> str:
        return f"{self.model}-{self.precision}-{self.accumulation}-{self.clipping}-{self.accelerator}"


def every_case(model: str) -> list[Case]:
    """All 24 combinations."""
    return [Case(model, *levels) for levels in product(PRECISIONS, ACCUMULATIONS, CLIPPINGS, ACCELERATORS)]


def pairwise_cases(model: str, index: int) -> list[Case]:
    """Four combinations in which every two levels of precision, accelerator and accumulation meet, and every clipping is used.

    Over any six models that follow one another, clipping meets every level of the others as well.

    Args:
        model: Its name.
        index: Its place among the models; the next model gets the other half of the combinations.
    """
    rows = product(enumerate(PRECISIONS), enumerate(ACCELERATORS))
    return [
        Case(model, precision, ACCUMULATIONS[(p + a + index) % 2], CLIPPINGS[(row + index // 2) % 3], accelerator)
        for row, ((p, precision), (a, accelerator)) in enumerate(rows)
    ]


def cases(models: Mapping[str, Subject], in_full: tuple[str, ...]) -> tuple[list[Case], list[Case]]:
    """The cases of every test run, and the rest of the cross product.

    Args:
        models: The models.
        in_full: Those of them of which every combination is run every time.
    """
    chosen: list[Case] = []
    for index, model in enumerate(models):
        chosen += every_case(model) if model in in_full else pairwise_cases(model, index)
    everything = [case for model in models for case in every_case(model)]
    return chosen, [case for case in everything if case not in set(chosen)]
