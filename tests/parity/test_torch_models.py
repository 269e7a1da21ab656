"""Modules of plain torch train alike, plain and streamed, whatever they do with their layers."""

import pytest

from tests.parity.compare import Parity
from tests.parity.table import Case, cases
from tests.parity.torch_models import MODELS

EVERY_TIME, THE_REST = cases(MODELS, in_full=("encoder", "convolutions"))
PARITY = Parity(MODELS)


@pytest.mark.parametrize("case", EVERY_TIME, ids=str)
def test_trains_as_it_does_plain(case: Case) -> None:
    PARITY.check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", THE_REST, ids=str)
def test_trains_as_it_does_plain_in_every_other_combination(case: Case) -> None:
    PARITY.check(case)


def test_every_case_is_collected() -> None:
    assert len(MODELS) == 36
    assert len(set(EVERY_TIME)) == 2 * 24 + 34 * 4
    assert len(set(EVERY_TIME) | set(THE_REST)) == 36 * 24


@pytest.mark.parametrize("policy", ["eager:weights", "eager:gradients", "eager:compute", "random:1", "random:2"])
@pytest.mark.parametrize("model", ["any_order", "tied", "in_place", "parameter_hooks"])
def test_trains_as_it_does_plain_in_whatever_order_the_lanes_run(model: str, policy: str) -> None:
    PARITY.check(Case(model, "bf16-mixed", 3, "norm", "emu"), policy)


@pytest.mark.parametrize("accelerator", ["cpu", "emu"])
@pytest.mark.parametrize("model", ["stochastic_depth", "twice", "one_many_times"])
def test_trains_as_it_does_plain_with_three_slots_and_one_staging_buffer(model: str, accelerator: str) -> None:
    PARITY.check(Case(model, "32-true", 3, "value", accelerator), slots=3, staging_buffers=1)
