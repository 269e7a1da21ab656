"""Sizes as users write them."""

from typing import Any

import pytest

from lightning_megatrain.engine import Engine
from lightning_megatrain.engine.sizes import parse_size
from tests.engine.models import Tower

GOOD: dict[int | str, int] = {
    1 << 20: 1 << 20,
    20 << 30: 20 << 30,
    "20GiB": 20 << 30,
    "20 GB": 20 * 10**9,
    "1.5 mib": 3 << 19,
    "2000000": 2_000_000,
    "1B": 1,
    " 8b ": 8,
    "1KB": 1000,
}


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
        (20, ValueError, r"saved_inputs=20 counts bytes, and 20 bytes are next to .*'20GB' says gigabytes, and '20B' that bytes are meant"),
        ((1 << 20) - 1, ValueError, r"saved_inputs=1048575 counts bytes"),
        ("80", ValueError, r"saved_inputs='80' counts bytes, .*'80GB' says gigabytes, and '80B' that"),
        (1.5, TypeError, r"saved_inputs=1\.5: a size is a number of bytes.*not float"),
        (True, TypeError, "not bool"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_what_is_no_size_is_refused(value: Any, error: type[Exception], message: str) -> None:
    model = Tower(layers=2)
    with pytest.raises(error, match=message):
        Engine(model, saved_inputs=value)
