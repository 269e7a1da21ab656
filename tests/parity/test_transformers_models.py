"""Hugging Face models train alike, plain and streamed."""

import logging

import pytest

from tests.parity.compare import Parity
from tests.parity.table import Case, cases
from tests.parity.transformers_models import MODELS

EVERY_TIME, THE_REST = cases(MODELS, in_full=("llama", "mixtral"))
PARITY = Parity(MODELS)


@pytest.mark.parametrize("case", EVERY_TIME, ids=str)
def test_trains_as_it_does_plain(case: Case) -> None:
    PARITY.check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", THE_REST, ids=str)
def test_trains_as_it_does_plain_in_every_other_combination(case: Case) -> None:
    PARITY.check(case)


def test_every_case_is_collected() -> None:
    assert len(MODELS) == 24
    assert len(set(EVERY_TIME)) == 2 * 24 + 22 * 4
    assert len(set(EVERY_TIME) | set(THE_REST)) == 24 * 24


@pytest.mark.parametrize("policy", ["eager:weights", "eager:gradients", "random:1"])
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_trains_as_it_does_plain_in_whatever_order_the_lanes_run(model: str, policy: str) -> None:
    PARITY.check(Case(model, "bf16-mixed", 3, "norm", "emu"), policy)


@pytest.mark.parametrize("model", ["qwen3_moe", "llava"])
def test_trains_as_it_does_plain_with_three_slots(model: str) -> None:
    PARITY.check(Case(model, "bf16-mixed", 1, "norm", "emu"), slots=3)


@pytest.mark.parametrize(("model", "device_memory"), [("gemma3n", 340_000), ("t5", 230_000)])
def test_trains_as_it_does_plain_with_saved_inputs_on_the_host_and_weights_kept_on_the_device(
    model: str, device_memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that share an encoder's output, or are given views of one tensor and hand keys and values on."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    PARITY.check(Case(model, "bf16-mixed", 3, "norm", "emu"), "random:1", saved_inputs="host", device_memory=device_memory)
    assert any(": 2 of 4 layers keep their weights on the device" in record.getMessage() for record in caplog.records)
