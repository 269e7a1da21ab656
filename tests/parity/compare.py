"""Compares two runs, number by number, and says where they part."""

import functools
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_megatrain import MegaTrainStrategy
from tests.emulated import EmulatedAccelerator, emulated_device
from tests.parity.exceptions import NOT_BITWISE, Tolerance
from tests.parity.subject import Subject
from tests.parity.table import CLIPPINGS, Case, Settings
from tests.parity.trace import Trace, train


class Parity:
    """The models of one file, with each plain run made once.

    Args:
        models: Subjects by name.
    """

    def __init__(self, models: Mapping[str, Subject]) -> None:
        self._models = models
        self._plain = functools.cache(self._run_plain)

    def _run_plain(self, model: str, precision: str, settings: Settings | None) -> Trace:
        trace = train(self._models[model], "auto", "cpu", precision, settings)
        assert settings or trace.kinds_of_steps == set(product((False, True), CLIPPINGS))
        for section, numbers in trace.sections():
            assert numbers, f"the plain run has no {section}"
            for name, value in numbers.items():
                assert value is None or bool(torch.isfinite(value).all()), (
                    f"{section} {name} of the plain run is not finite, so it proves nothing"
                )
        return trace

    def check(self, case: Case, policy: str = "lazy", **strategy: Any) -> None:
        """Trains plain and streamed and raises AssertionError where they part.

        Args:
            case: What to run.
            policy: In which order the emulated device's lanes run.
            strategy: More arguments for the strategy.
        """
        subject = self._models[case.model]
        plain = self._plain(case.model, case.precision, case.settings)
        megatrain = MegaTrainStrategy(fused_optimizer=False, **{**subject.strategy, **strategy})
        if case.accelerator == "emu":
            with emulated_device(policy):
                streamed = train(subject, megatrain, EmulatedAccelerator(), case.precision, case.settings)
        else:
            streamed = train(subject, megatrain, case.accelerator, case.precision, case.settings)
        assert streamed.streamed == set(subject.streamed)
        assert streamed.kinds_of_steps == plain.kinds_of_steps
        assert streamed.module == plain.module
        tolerance = NOT_BITWISE.get((case.model, case.precision, case.accelerator))
        parting = first_parting(plain, streamed, tolerance)
        assert parting is None, parting


def first_parting(plain: Trace, streamed: Trace, tolerance: Tolerance | None = None) -> str | None:
    """Where two runs part first, in words: the loss, the module whose gradient comes first in backward, or the parameter or buffer."""
    for (section, expected), (_, found) in zip(plain.sections(), streamed.sections(), strict=True):
        if expected.keys() != found.keys():
            return f"the runs do not have the same {section}: {sorted(expected.keys() ^ found.keys())}"
        for name, value in expected.items():
            if not _same(value, found[name], section, tolerance):
                parted = sum(not _same(value, found[other], section, tolerance) for other, value in expected.items())
                what = f"the gradient of module {_module(name)!r} (parameter {name})" if section == "gradient" else f"{section} {name}"
                return f"{what} parts first: {_difference(value, found[name])}; {parted} of {len(expected)} numbers of this kind part"
    return None


def _module(name: str) -> str:
    return name.split(" at ")[0].rpartition(".")[0]


def _same(expected: Tensor | None, found: Tensor | None, section: str, tolerance: Tolerance | None) -> bool:
    if expected is None or found is None:
        return expected is found
    if _form(expected) != _form(found):
        return False
    if tolerance is None:
        return torch.equal(expected, found)
    return _distance(expected, found) <= tolerance.of(section) * _size(expected)


def _difference(expected: Tensor | None, found: Tensor | None) -> str:
    if expected is None or found is None:
        return f"None in the {'plain' if expected is None else 'streamed'} run only"
    if _form(expected) != _form(found):
        return f"plain {_form(expected)}, streamed {_form(found)}"
    return f"by up to {_distance(expected, found):.1e} where the largest is {_size(expected):.1e}"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max())
