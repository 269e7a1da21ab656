"""When a policy acts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps at which a policy acts; zero is legal everywhere.

    Args:
        warmup_steps: First acts after this many optimizer steps; 0 acts before the first.
        every_n_steps: Then acts again each time this many more have passed; 0 acts only once.
        max_updates: Acts at most this often; 0 never acts, None has no limit.

    Raises:
        TypeError: a number is not whole.
        ValueError: a number is negative.
    """

    warmup_steps: int = 0
    every_n_steps: int = 1
    max_updates: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("warmup_steps", "every_n_steps", "max_updates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
            if value is not None and value < 0:
                raise ValueError(f"`{name}` must be zero or more, got {value}.")

    def due(self, step: int, updates: int) -> bool:
        """Return whether to act when ``step`` optimizer steps are done and the policy has acted ``updates`` times."""
        if step < self.warmup_steps or (self.max_updates is not None and updates >= self.max_updates):
            return False
        since = step - self.warmup_steps
        if self.every_n_steps == 0:
            return updates == 0  # also later than planned, when the policy is new in a resumed run
        return since % self.every_n_steps == 0
