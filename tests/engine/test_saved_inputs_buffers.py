"""The host memory that saved inputs move to."""

import functools

import pytest
import torch

from lightning_megatrain.engine import Engine, pinning
from lightning_megatrain.engine.report import report
from tests.emulated import PageLocks, emulated_device
from tests.engine.models import INPUT, WIDTH, Tower, loss_of, tokens


def test_host_buffers_are_used_again_after_backward_and_after_a_dropped_graph() -> None:
    with emulated_device():
        model = Tower(layers=6)
        with Engine(model, "emu", saved_inputs="host") as engine:
            for seed in range(3):
                loss_of(model, tokens(seed, "emu")).backward()
                assert engine.saved_inputs.host_bytes == 5 * INPUT
            for seed in range(3):
                loss_of(model, tokens(seed, "emu"))  # dropped at once
                assert engine.saved_inputs.host_bytes == 5 * INPUT
            assert engine.accounting.device_bytes["saved inputs"] == 0


def test_buffers_that_have_become_too_small_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = PageLocks()
    monkeypatch.setitem(pinning.PAGE_LOCKERS, "emu", lambda: locks)
    with emulated_device():
        model = Tower(layers=4)
        with Engine(model, "emu", saved_inputs="host") as engine:
            before = len(locks.locked)
            for rows in (2, 4, 3, 200, 100):
                inputs = torch.randint(12, (rows, 5)).to("emu")
                loss_of(model, inputs).backward()
                assert engine.saved_inputs.host_bytes == 3 * max(rows, {3: 4, 100: 200}.get(rows, 0)) * 5 * WIDTH * 4
                assert len(locks.locked) == before + 3 + 2  # and two staging buffers for gradients
        assert not locks.locked


def test_the_report_counts_the_host_buffers() -> None:
    with emulated_device():
        model = Tower(layers=9)
        with Engine(model, "emu", saved_inputs="host") as engine:
            loss_of(model, tokens(device="emu")).backward()
            (row,) = [line.split() for line in report(engine).splitlines() if line.startswith("  saved inputs")][:1]
    assert row[2:4] == ["5.0", "KiB"]


def test_the_report_says_what_could_not_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (None, 0):
        monkeypatch.setitem(pinning.PAGE_LOCKERS, "emu", functools.partial(PageLocks, limit))
        with emulated_device():
            model = Tower(layers=9)
            with Engine(model, "emu", saved_inputs="host") as engine:
                loss_of(model, tokens(device="emu")).backward()
                found.append("5.0 KiB of saved inputs lie in memory that the system refused to page-lock" in report(engine))
    assert found == [False, True]
