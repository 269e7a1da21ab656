"""Sizes of memory as people write them: 20 GiB is `"20GiB"`."""

import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power for power, prefix in enumerate("kmgt", start=1) for base, ending in ((1000, "b"), (1024, "ib"))
}


def parse_size(value: int | str, option: str) -> int:
    """Returns a size in bytes.

    Args:
        value: A number of bytes, or text such as ``"20GiB"`` (1024 to the third), ``"20 GB"`` (1000 to the third) or ``"1.5 TiB"``.
        option: The name of the option that was given `value`, for the message.

    Raises:
        TypeError: `value` is neither an int nor a str.
        ValueError: `value` is no size, or not above zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{option}={value!r}: a size is a number of bytes (an int) or text like '20GiB', not {type(value).__name__}.")
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if found is None or found[2] not in _UNITS:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ValueError(f"{option}={value!r} is no size. Write a number of bytes, or a number and one of {units}, as in '20GiB'.")
    nbytes = int(Fraction(found[1]) * _UNITS[found[2]])
    if nbytes <= 0:
        raise ValueError(f"{option}={value!r}: a size must be above zero. Leave the option out to do without.")
    return nbytes


def size_text(nbytes: int) -> str:
    """The size in the largest binary unit that leaves at least 1, with one decimal."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
