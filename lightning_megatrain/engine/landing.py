"""What becomes of a gradient on the host: it is added to `.grad`, summed up to a norm on the way, or used at once."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_megatrain.engine.host import is_dense

Landed = Sequence[tuple[Parameter, Tensor]]


class Landing:
    """Accumulates gradients into host parameters: copied where `.grad` is None, else added.

    That one rule, as autograd itself has it, gives accumulation over micro-batches, manual optimization and several optimizers.
    """

    def __init__(self) -> None:
        self.use_at_once: Callable[[Landed], Landed] | None = None
        """Takes gradients in the place of `.grad`; returns those that it leaves."""
        self._sums: dict[Parameter, Tensor | None] = {}
        """Gradients that are summed over this backward before they land."""
        self._last: _LastBackward | None = None
        self._finished: _LastBackward | None = None

    def sum_over_backward(self, parameters: Iterable[Parameter]) -> None:
        """Lets the gradients of one backward be summed with each other before they land, as autograd does for what is used twice."""
        self._sums |= {parameter: self._sums.get(parameter) for parameter in parameters}

    def land(self, gradients: Landed, owned: bool) -> None:
        """Takes gradients on the host.

        Args:
            gradients: Parameters and gradients, of any dtype and strides.
            owned: Whether the gradients' memory may be kept.
        """
        with torch.no_grad():
            for parameter, gradient in gradients:
                if parameter in self._sums:
                    known, whole = self._sums[parameter], parameter.grad_dtype or torch.float32
                    self._sums[parameter] = _like(parameter, gradient, owned, whole) if known is None else _sum(known, gradient)
            self._land([pair for pair in gradients if pair[0] not in self._sums], owned)

    def complete(self) -> None:
        """The outermost backward has ended: what was summed over it lands."""
        sums, self._sums = self._sums, {}
        with torch.no_grad():
            self._land([(parameter, total) for parameter, total in sums.items() if total is not None], owned=True)
            if self._last is not None:
                self._last.finish_rest()
                self._finished, self._last = self._last, None

    def abandon(self) -> None:
        """Drops what a failed backward left."""
        self._sums.clear()
        self._last = self._finished = None

    def expect_last(self, parameters: Sequence[Parameter], scale: float = 1.0) -> None:
        """Says that the next backward is the last before a step: as gradients become final they are scaled, and their norms taken.

        Saves two passes over host memory. Numbers are those of multiplying every `.grad` by `scale` after the backward, and of
        `torch.nn.utils.get_total_norm`.

        Args:
            parameters: All that have gradients in this step, also those that got them in earlier backwards.
            scale: Multiplies each gradient.
        """
        self._last, self._finished = _LastBackward(parameters, scale), None

    def total_norm(self, parameters: Sequence[Parameter]) -> Tensor | None:
        """The 2-norm of all gradients of `parameters`, FP32; None where it was not summed up, or something was written since."""
        return None if self._finished is None else self._finished.total_norm(parameters)

    def _land(self, gradients: Landed, owned: bool) -> None:
        if self.use_at_once is not None:
            gradients = self.use_at_once(gradients)
        for parameter, gradient in gradients:
            _accumulate(parameter, gradient, owned)
            if self._last is not None:
                self._last.finish(parameter)


class _LastBackward:
    """The gradients of a step while they become final, each finished while it is still in the processor's cache."""

    def __init__(self, parameters: Sequence[Parameter], scale: float) -> None:
        self._parameters, self._scale = parameters, scale
        self._norms: dict[Parameter, tuple[Tensor, tuple[int, int]]] = {}

    def finish(self, parameter: Parameter) -> None:
        if self._scale != 1.0:
            assert parameter.grad is not None
            if parameter.grad.dtype is torch.bfloat16:
                parameter.grad = parameter.grad.float()
            parameter.grad.mul_(self._scale)
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self._norms[parameter] = _norm(parameter.grad), _written(parameter)

    def finish_rest(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and parameter not in self._norms:
                self.finish(parameter)

    def total_norm(self, parameters: Sequence[Parameter]) -> Tensor | None:
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in with_gradient:
            if parameter not in self._norms or self._norms[parameter][1] != _written(parameter):
                return None
        if not with_gradient:
            return None
        return torch.linalg.vector_norm(torch.stack([self._norms[parameter][0] for parameter in with_gradient]))


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.dtype is torch.bfloat16 else None)


def _written(parameter: Parameter) -> tuple[int, int]:
    assert parameter.grad is not None
    return parameter.grad._version, parameter.grad.data_ptr()


def _accumulate(parameter: Parameter, gradient: Tensor, owned: bool) -> None:
    """Adds to `.grad`. Where the parameter takes gradients of any dtype, one alone stays as it came, and sums are FP32."""
    held = parameter.grad
    if held is None:
        parameter.grad = _like(parameter, gradient, owned, parameter.grad_dtype or gradient.dtype)
    elif held.layout is not torch.strided:
        parameter.grad = _sum(held, gradient)
    elif parameter.grad_dtype is None and held.dtype is not torch.float32:
        parameter.grad = held.float().add_(gradient)
    else:
        held.add_(gradient)


def _sum(known: Tensor, gradient: Tensor) -> Tensor:
    """Adds in place where the first is dense; a sparse one (an embedding's) cannot take a dense one in, and torch adds it to that alone."""
    if known.layout is torch.strided:
        return known.add_(gradient)
    return known + gradient if gradient.layout is known.layout else gradient + known


def _like(parameter: Parameter, gradient: Tensor, owned: bool, dtype: torch.dtype) -> Tensor:
    """The gradient in a dtype and the strides of its parameter, with memory of its own."""
    if gradient.layout is not torch.strided:
        return gradient if owned else gradient.clone()
    if owned and gradient.dtype == dtype and (gradient.stride() == parameter.stride() or not is_dense(parameter)):
        return gradient
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(gradient)
