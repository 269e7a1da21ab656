"""The learning rate over the steps of a training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def share_of_peak(schedule: Schedule, step: int, steps: Callable[[], float], warmup: int, least: float) -> float:
    """Return the learning rate of a step as a share of the peak.

    Args:
        schedule: How it falls after the warmup.
        step: Counted from 0.
        steps: Tells the number of steps of the whole training; asked only while the rate falls.
        warmup: Steps over which the rate rises evenly to its peak.
        least: The share at the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant" or step == warmup:
        return 1.0
    done = min(1.0, (step - warmup) / max(1.0, steps() - 1 - warmup))
    share = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return least + (1 - least) * share
