"""Updates in backward: a parameter is updated as its gradient lands, and the gradient is never stored."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_megatrain.optim.host_adamw import HostAdamW


class BackwardUpdates:
    """Updates the parameters of a HostAdamW from gradients that somebody holds for a moment.

    Half a step cannot be taken back: when a backward fails after its first update the run is torn, as some weights are a step ahead.

    Args:
        optimizer: The optimizer; until `close` its `step` ends a step, and updates only what has a `.grad`.
    """

    def __init__(self, optimizer: HostAdamW) -> None:
        self._optimizer = optimizer
        self._updated: set[Tensor] = set()
        self._step_at_once = optimizer.take_step
        optimizer.take_step = self._end_step

    def take(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Updates parameters from their gradients, each of them once a step.

        Raises:
            RuntimeError: A parameter was updated in this step already.
        """
        self._refuse_second(parameter for parameter, _ in gradients)
        self._updated.update(parameter for parameter, _ in gradients)
        self._optimizer.update([parameter for parameter, _ in gradients], [gradient for _, gradient in gradients])

    @property
    def torn(self) -> bool:
        """Whether a step began to update and did not end."""
        return bool(self._updated)

    def check(self) -> None:
        """Raises RuntimeError where a step began to update and did not end."""
        if self.torn:
            raise RuntimeError(
                f"A step failed after {len(self._updated)} parameters had been updated in its backward (transient_gradients=True), so the "
                "weights are of two different steps. Resume from a checkpoint: Trainer.fit(ckpt_path=...)."
            )

    def close(self) -> None:
        """Gives `step` back to the optimizer."""
        self._optimizer.take_step = self._step_at_once

    def _end_step(self, params: list[Tensor], grad_scale: float) -> None:
        self._refuse_second(params)  # the loss may use a layer's parameter itself, and autograd then stores that gradient
        self._step_at_once(params, grad_scale)
        self._updated.clear()

    def _refuse_second(self, params: Iterable[Tensor]) -> None:
        for parameter in params:
            if parameter in self._updated:
                raise RuntimeError(
                    f"A second gradient came in one step for a parameter of shape {tuple(parameter.shape)}, and with "
                    "transient_gradients=True its first has been used already. Call backward() once a step and use the parameter in its "
                    "layer alone, or set MegaTrainStrategy(transient_gradients=False)."
                )
