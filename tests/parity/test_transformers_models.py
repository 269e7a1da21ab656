"""Hugging Face models train alike, plain and streamed."""

import logging
import re

import pytest

from tests.parity.compare import Parity
from tests.parity.table import Case, Settings, every_case, every_setting
from tests.parity.transformers_models import MODELS

EVERY_CASE = every_case(MODELS)
EVERY_SETTING = every_setting("llama")
PARITY = Parity(MODELS)


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_trains_as_it_does_plain(case: Case) -> None:
    PARITY.check(case)


@pytest.mark.parametrize("case", EVERY_SETTING, ids=str)
def test_trains_as_it_does_plain_when_all_steps_are_alike(case: Case) -> None:
    PARITY.check(case)


def test_every_case_is_collected() -> None:
    assert len(MODELS) == 24
    assert len(set(EVERY_CASE)) == 24 * 4
    assert len(set(EVERY_SETTING)) == 24


@pytest.mark.parametrize("policy", ["eager:weights", "eager:gradients", "random:1"])
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_trains_as_it_does_plain_in_whatever_order_the_lanes_run(model: str, policy: str) -> None:
    PARITY.check(Case(model, "bf16-mixed", "emu", Settings(3, "norm")), policy)


@pytest.mark.parametrize("model", ["qwen3_moe", "llava"])
def test_trains_as_it_does_plain_with_three_slots(model: str) -> None:
    PARITY.check(Case(model, "bf16-mixed", "emu", Settings(1, "norm")), slots=3)


@pytest.mark.parametrize(("model", "device_memory"), [("gemma3n", "340KB"), ("t5", "230KB")])
def test_trains_as_it_does_plain_with_saved_inputs_on_the_host_and_weights_kept_on_the_device(
    model: str, device_memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that share an encoder's output, or are given views of one tensor and hand keys and values on."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    PARITY.check(Case(model, "bf16-mixed", "emu", Settings(3, "norm")), "random:1", saved_inputs="host", device_memory=device_memory)
    # how many of them depends on what the garbage collector has left of the first step
    kept = [int(found[1]) for r in caplog.records if (found := re.search(r": (\d) of 4 layers keep their weights", r.getMessage()))]
    assert len(kept) == 1
    assert 0 < kept[0] < 4
