"""Gradients on their way from the device to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_megatrain.engine.accounting import Accounting, Holding
from lightning_megatrain.engine.host import is_dense
from lightning_megatrain.engine.landing import Landing
from lightning_megatrain.engine.lanes import Event, Held, Lanes
from lightning_megatrain.engine.sources import in_memory_order


@dataclass
class _Piece:
    """A run of elements of one parameter's gradient in a staging buffer."""

    parameter: Parameter
    start: int
    staged: Tensor  # flat, in the order of the gradient's memory
    shape: torch.Size  # of the whole gradient
    stride: tuple[int, ...]


@dataclass
class _Transfer:
    """One staging buffer's worth of gradients, on its way until `copied` has passed."""

    staging: Tensor
    used: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    copied: Event | None = None
    held: Held | None = None
    holding: Holding | None = None


class Gradients:
    """Brings the gradients of host parameters to the host, where they land.

    On an accelerator they pass through a bounded pool of staging buffers; the pool's oldest is emptied on the host when a new one is
    wanted, behind compute already queued, so no thread is needed.

    Order on an accelerator: the copy waits until compute has made the gradient; the device's gradient is owned here until compute has
    waited for the copy (its memory would be handed out again under the copy); the host waits for the copy before it reads the staging
    buffer, and reads it before it is used again. When `backward()` returns, everything has arrived.
    """

    def __init__(self, lanes: Lanes, make_staging: Callable[[], list[Tensor]], accounting: Accounting) -> None:
        self._lanes, self._make_staging, self._accounting = lanes, make_staging, accounting
        self._free: list[Tensor] | None = None
        self._on_the_way: list[_Transfer] = []
        self._parts: dict[Parameter, Tensor] = {}
        self.landing = Landing()
        self._tasks: set[int] = set()
        self._from_autograd: list[tuple[Parameter, Tensor]] = []
        self._used_outside: set[Parameter] = set()  # by a loss, past their layer
        self._handles: list[RemovableHandle] = []

    @property
    def staging_bytes(self) -> int:
        """Host bytes of the staging buffers; they are made when the first gradient is on its way."""
        return sum(buffer.nbytes for buffer in (*(self._free or ()), *(transfer.staging for transfer in self._on_the_way)))

    def expect(self, on_complete: Sequence[Callable[[], None]]) -> None:
        """Called in every backward of the engine: what is on the way will have arrived when this backward returns."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        self._tasks.add(task)

        def complete() -> None:
            self._tasks.discard(task)
            self._complete()
            for function in on_complete:
                function()

        Variable._execution_engine.queue_callback(complete)

    def listen(self, node: Node, parameter: Parameter) -> None:
        """Takes over what autograd itself would accumulate in this backward into a parameter that the loss uses outside its layer too.

        On an accelerator autograd would do so in another thread, while gradients of the layer arrive. And as in autograd the two are to be
        summed before they are added to what `.grad` holds; so once it was seen that the loss uses a parameter, the layer's gradient waits.

        Args:
            node: The parameter's accumulator in the graph.
            parameter: The parameter.
        """

        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
            if gradients[0] is not None:
                self._from_autograd.append((parameter, gradients[0]))
                self._used_outside.add(parameter)
            return (None,)

        self._handles.append(node.register_prehook(take))

    def deliver(self, gradients: Sequence[tuple[Parameter, Tensor]], more_to_come: bool = False) -> None:
        """Takes gradients of one run of a layer, on the device, for host parameters.

        Args:
            gradients: Parameters and their gradients.
            more_to_come: Whether the layer ran more than once, or other copies of a resident parameter are in a graph. As in autograd, the
                gradients of one backward are then summed with each other before they are added to what `.grad` holds from earlier ones.
        """
        self.landing.sum_over_backward(parameter for parameter, _ in gradients if more_to_come or parameter in self._used_outside)
        if self._lanes.in_host_memory:
            self.landing.land(gradients, owned=True)
            return
        for transfer in self._on_the_way[:-1]:
            self._give_back(transfer)
        self._lanes.gradients.wait(self._lanes.compute.record(), "gradients computed")
        current: _Transfer | None = None
        device: list[Tensor] = []
        for parameter, gradient in gradients:
            if gradient.layout is not torch.strided:
                self.landing.land([(parameter, gradient.to("cpu"))], owned=True)
                continue
            gradient = gradient if is_dense(gradient) else gradient.contiguous()
            device.append(gradient)
            flat = in_memory_order(gradient)
            start = 0
            while start < flat.numel():
                if current is None or current.staging.nbytes - current.used < flat.element_size():
                    self._send_off(current, device)
                    current = _Transfer(self._staging())
                room = (current.staging.nbytes - current.used) // flat.element_size()
                chunk = flat[start : start + room]
                staged = current.staging[current.used : current.used + chunk.nbytes].view(chunk.dtype)
                self._lanes.gradients.copy(staged, chunk)
                current.pieces.append(_Piece(parameter, start, staged, gradient.shape, gradient.stride()))
                current.used += -(-chunk.nbytes // 16) * 16
                start += chunk.numel()
                self._accounting.bytes_to_host += chunk.nbytes
        self._send_off(current, device)

    def _send_off(self, transfer: _Transfer | None, device: list[Tensor]) -> None:
        if transfer is None:
            return
        transfer.copied = self._lanes.gradients.record()
        transfer.held = self._lanes.gradients.hold(device, "gradients")
        transfer.holding = self._accounting.hold("gradients", device)
        self._on_the_way.append(transfer)

    def _staging(self) -> Tensor:
        if self._free is None:
            self._free = self._make_staging()
        if not self._free:
            self._finish(self._on_the_way.pop(0))
        return self._free.pop()

    def _recycle(self, staging: Tensor) -> None:
        assert self._free is not None
        self._free.append(staging)

    def _give_back(self, transfer: _Transfer) -> None:
        """Lets the device's allocator have the gradients' memory, which it hands out in compute's order."""
        if transfer.held is not None and transfer.copied is not None:
            self._lanes.compute.wait(transfer.copied, "gradients copied")
            transfer.held.release()
            transfer.held = transfer.holding = None

    def _finish(self, transfer: _Transfer) -> None:
        self._give_back(transfer)
        assert transfer.copied is not None
        self._lanes.synchronize(transfer.copied, "gradients arrived")
        whole = [piece for piece in transfer.pieces if piece.staged.numel() == piece.shape.numel()]
        self.landing.land([(piece.parameter, piece.staged.as_strided(piece.shape, piece.stride)) for piece in whole], owned=False)
        for piece in transfer.pieces:
            if piece.staged.numel() != piece.shape.numel():
                self._arrive_in_part(piece)
        self._recycle(transfer.staging)

    def _arrive_in_part(self, piece: _Piece) -> None:
        """A gradient larger than a staging buffer is put together on the host first."""
        gradient = self._parts.get(piece.parameter)
        if gradient is None:
            gradient = self._parts[piece.parameter] = torch.empty_strided(piece.shape, piece.stride, dtype=piece.staged.dtype)
        flat = in_memory_order(gradient)
        flat[piece.start : piece.start + piece.staged.numel()].copy_(piece.staged)
        if piece.start + piece.staged.numel() == gradient.numel():
            self.landing.land([(piece.parameter, self._parts.pop(piece.parameter))], owned=True)

    def _complete(self) -> None:
        """Waits for everything on the way; the outermost backward then accumulates what was summed over it."""
        for transfer in self._on_the_way:
            self._finish(transfer)
        self._on_the_way.clear()
        if self._tasks:
            return
        self.landing.land([(parameter, gradient.to(parameter.device)) for parameter, gradient in self._from_autograd], owned=False)
        self._forget_listeners()
        self.landing.complete()

    def _forget_listeners(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._from_autograd.clear()

    def abandon(self) -> None:
        """Drops what a failed backward left on the way."""
        self._forget_listeners()
        for transfer in self._on_the_way:
            self._give_back(transfer)
            if transfer.copied is not None:
                self._lanes.synchronize(transfer.copied, "gradients arrived")
            self._recycle(transfer.staging)
        self._on_the_way.clear()
        self.landing.abandon()
        self._parts.clear()
        self._tasks.clear()


def has_hooks(parameter: Parameter) -> bool:
    """Whether someone listens to the parameter's gradient; autograd must then be given it, on the host, and waited for."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
