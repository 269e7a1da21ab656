"""Every test that takes `place` runs on the CPU and on the emulated accelerator."""

import pytest

from tests.strategy.compare import Place


@pytest.fixture(params=["cpu", "emu"])
def place(request: pytest.FixtureRequest) -> Place:
    """Where the strategy computes."""
    where: Place = request.param
    return where
