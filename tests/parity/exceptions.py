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


# A loss to a few roundings of FP32. Gradients of later steps are taken at weights that already differ by as much, and cancel in part (a
# key's weight, under softmax). Adam divides by the gradient's own
# size: one near zero carries its error into a step of the learning rate's size.
_FP32 = {"loss": 1e-6, "gradient": 1e-5, "state": 1e-4}

_ENCODER_OUTPUT = Tolerance(
    "the encoder's output feeds keys and values of every decoder layer, and its gradient is summed in another order", **_FP32
)

NOT_BITWISE: dict[tuple[str, str, str], Tolerance] = {
    ("t5", "32-true", "cpu"): _ENCODER_OUTPUT,
    ("t5", "32-true", "emu"): _ENCODER_OUTPUT,
}
"""By model, precision and accelerator."""
