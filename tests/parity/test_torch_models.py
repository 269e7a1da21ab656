"""Modules of plain torch train alike, plain and streamed, whatever they do with their layers."""

import pytest

from tests.parity.compare import Parity
from tests.parity.table import PRECISIONS, Case, Settings, every_case, every_setting
from tests.parity.torch_models import CPU_ALONE, MODELS

EVERY_CASE = every_case(MODELS)
EVERY_SETTING = every_setting("convolutions")
PARITY = Parity({**MODELS, **CPU_ALONE})


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_trains_as_it_does_plain(case: Case) -> None:
    PARITY.check(case)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", CPU_ALONE)
def test_trains_as_it_does_plain_on_the_cpu(model: str, precision: str) -> None:
    PARITY.check(Case(model, precision, "cpu"))


@pytest.mark.parametrize("case", EVERY_SETTING, ids=str)
def test_trains_as_it_does_plain_when_all_steps_are_alike(case: Case) -> None:
    PARITY.check(case)


def test_every_case_is_collected() -> None:
    assert len(MODELS) == 36
    assert len(set(EVERY_CASE)) == 36 * 4
    assert len(set(EVERY_SETTING)) == 24


@pytest.mark.parametrize("policy", ["eager:weights", "eager:gradients", "eager:compute", "random:1", "random:2"])
@pytest.mark.parametrize("model", ["any_order", "tied", "in_place", "parameter_hooks"])
def test_trains_as_it_does_plain_in_whatever_order_the_lanes_run(model: str, policy: str) -> None:
    PARITY.check(Case(model, "bf16-mixed", "emu", Settings(3, "norm")), policy)


@pytest.mark.parametrize("accelerator", ["cpu", "emu"])
@pytest.mark.parametrize("model", ["stochastic_depth", "twice", "one_many_times"])
def test_trains_as_it_does_plain_with_three_slots_and_one_staging_buffer(model: str, accelerator: str) -> None:
    PARITY.check(Case(model, "32-true", accelerator, Settings(3, "value")), slots=3, staging_buffers=1)
