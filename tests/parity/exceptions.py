"""The models that are not equal bit for bit, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be off, relative to the largest element of its tensor, and why."""

    reason: str
    loss: float
    gradient: float
    state: float

    def of(self, section: str) -> float:
        """The tolerance for numbers of that kind."""
        return {"loss": self.loss, "gradient": self.gradient, "state": self.state}[section]


# Loss and gradients to a few roundings of FP32. Adam divides by the gradient's own size, so that a gradient near zero carries its error,
# however small, into a step of the size of the learning rate.
_FP32 = {"loss": 1e-6, "gradient": 1e-6, "state": 1e-4}

NOT_BITWISE: dict[tuple[str, str, str], Tolerance] = {
    ("lstm", "32-true", "emu"): Tolerance(
        "the CPU runs an LSTM as one kernel of oneDNN, the emulated device as single operations", **_FP32
    ),
}
"""By model, precision and accelerator."""
