"""Sizes of memory as people write them: 20 GiB is `"20GiB"`."""

import re
from collections.abc import Sequence
from fractions import Fraction

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power for power, prefix in enumerate("kmgt", start=1) for base, ending in ((1000, "b"), (1024, "ib"))
}

_LEAST_WITHOUT_UNIT = 1 << 20


def parse_size(value: int | str, option: str, words: Sequence[str] = ()) -> int:
    """Returns a size in bytes.

    Args:
        value: A number of bytes, at least 1 MiB, as by fewer larger units are meant; or text such as ``"20GiB"`` (1024 to the third),
            ``"20 GB"`` (1000 to the third), ``"1.5 TiB"`` or ``"64B"``. Units may be written small as a whole; ``"Gb"`` is refused, as it
            means bits.
        option: The name of the option that was given `value`, for the message.
        words: What the option may be besides a size, for the message.

    Raises:
        TypeError: `value` is neither an int nor a str.
        ValueError: `value` is no size, not above zero, or a number without unit below 1 MiB.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{option}={value!r}: a size is a number of bytes (an int) or text like '20GiB', not {type(value).__name__}.")
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    if found is None or found[2].lower() not in _UNITS:
        wanted = " or ".join([*map(repr, words), "a number of bytes", "a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"])
        raise ValueError(f"{option}={value!r} is no size. Write {wanted}, as in '20GiB'.")
    number, unit = found.groups()
    if unit.endswith("b") and not unit.islower():
        raise ValueError(f"{option}={value!r}: {unit} counts bits, and a size is in bytes. Write '{number}{unit[:-1]}B'.")
    if "." in number and _UNITS[unit.lower()] == 1:
        raise ValueError(f"{option}={value!r} is no whole number of bytes. Write a unit behind it, as in '{number}GiB'.")
    nbytes = int(Fraction(number) * _UNITS[unit.lower()])
    if nbytes <= 0:
        raise ValueError(f"{option}={value!r}: a size must be above zero. Leave the option out to do without.")
    if not unit and nbytes < _LEAST_WITHOUT_UNIT:
        raise ValueError(
            f"{option}={value!r} counts bytes, and {number} bytes are next to nothing. '{number}GB' says gigabytes, "
            f"and '{number}B' that bytes are meant."
        )
    return nbytes


def size_text(nbytes: int) -> str:
    """The size in the largest binary unit that leaves at least 1, with one decimal."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
