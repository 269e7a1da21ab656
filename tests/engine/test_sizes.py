"""Sizes as users write them."""

from typing import Any

import pytest

from lightning_megatrain.engine import Engine
from lightning_megatrain.engine.sizes import parse_size
from tests.engine.models import Tower

GOOD: dict[int | str, int] = {1: 1, 20 << 30: 20 << 30, "20GiB": 20 << 30, "20 GB": 20 * 10**9, "1.5 mib": 3 << 19, "64": 64, " 8b ": 8}


@pytest.mark.parametrize("text", GOOD)
def test_sizes(text: int | str) -> None:
    assert parse_size(text, "device_memory") == GOOD[text]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("20 bananas", ValueError, r"saved_inputs='20 bananas' is no size.*'20GiB'"),
        ("", ValueError, "is no size"),
        (0, ValueError, r"saved_inputs=0: a size must be above zero"),
        (-1, ValueError, r"saved_inputs=-1: a size must be above zero"),
        ("-2GiB", ValueError, "above zero"),
        (1.5, TypeError, r"saved_inputs=1\.5: a size is a number of bytes.*not float"),
        (True, TypeError, "not bool"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_what_is_no_size_is_refused(value: Any, error: type[Exception], message: str) -> None:
    model = Tower(layers=2)
    with pytest.raises(error, match=message):
        Engine(model, saved_inputs=value)
