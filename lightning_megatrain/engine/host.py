"""The host's side of a streamed layer: its parameters, the dtypes they travel in, and the bytes to send."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_megatrain.engine.buffers import LayerBuffers
from lightning_megatrain.engine.placement import Place, places_of
from lightning_megatrain.engine.sources import OnTheWay, SplitWeights, exact_dtype
from lightning_megatrain.engine.surroundings import generators_of

ALIGNMENT = 64  # bytes: what vector loads and tensor cores ask of a view's first element

Stamp = tuple[tuple[int, int, int], ...]


class Mode(NamedTuple):
    """What decides how a layer uses its weights."""

    training: bool
    casting: bool
    """Whether autocast to BF16 is on."""
    decided: bool
    """Whether it had been seen before the call how autocast treats the weights."""


class Clock:
    """Counts the moments at which code we do not know may have written weights without autograd seeing it."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> None:
        self.now += 1


class CopyWriter(Protocol):
    """Updates parameters, and writes their working copies in the same pass."""

    def set_working_copy(self, parameter: Tensor, copy: Tensor | None) -> None:
        """Fills the copy, and lets it be written by every update from now on."""

    def wrote(self, parameter: Tensor, copy: Tensor) -> bool:
        """Whether the copy has the parameter's value, as nobody else wrote the parameter."""


class HostLayer:
    """One streamed layer as it lies in host memory.

    The parameters stay the user's own, where and as they are. Those that travel in another dtype have a working copy beside them,
    refreshed at the first load after anything may have written the parameter, or are cast on the way; a parameter with gaps between its
    elements has a copy always.

    Args:
        index: Position in order of registration.
        name: Path of the module.
        module: The layer.
        forward: The module's own forward, as it was before the engine took its place.
        resident: Parameters that do not travel with layers.
        compute_dtype: The dtype in which floating-point parameters travel; None for their own.
        allocate: Gives host memory for working copies.
        keep_copies: Whether there are working copies; else every load casts.
        split: Knows the parameters that are upper halves of FP32 weights.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        resident: set[Parameter],
        compute_dtype: torch.dtype | None,
        allocate: Callable[[int], Tensor],
        keep_copies: bool = True,
        split: SplitWeights | None = None,
    ) -> None:
        self._keep_copies, self._split = keep_copies, split
        self.index, self.name, self.module, self.forward, self._allocate = index, name, module, forward, allocate
        self.modules = list(module.modules())
        places = places_of(self.modules)
        self.parameters = [parameter for parameter in places if parameter not in resident]
        self.places: list[list[Place]] = [places[parameter] for parameter in self.parameters]
        self.borrowed: list[list[Place]] = [places[parameter] for parameter in places if parameter in resident]
        """Places of parameters that belong to other parts of the model as well: they come from the resident side, as inputs."""
        self._has_halves = split is not None and any(map(split.holds, self.parameters))
        self.buffers = LayerBuffers(name, self.modules)
        self.generators = generators_of(self.modules)
        self.updates = 0
        """Times an optimizer stepped parameters of this layer; fused kernels do so without changing `_version`."""
        self.outstanding = 0
        """Forwards with gradients whose backward may still come."""
        self._seen_modes: set[bool] = set()
        self._own_dtypes = [compute_dtype if compute_dtype and p.is_floating_point() else exact_dtype(p, split) for p in self.parameters]
        self._dtypes_of_mode: dict[bool, list[torch.dtype]] = {}
        self._copies_of: dict[tuple[torch.dtype, ...], dict[int, Tensor]] = {}
        self.copy_writer: CopyWriter | None = None
        """Keeps BF16 copies of FP32 parameters up to date; to be set where writes of others can be told by `_version`."""
        self.layout = 0
        """Changes when the dtypes do."""
        self._set_dtypes(self._own_dtypes)

    def _set_dtypes(self, dtypes: list[torch.dtype]) -> None:
        self.dtypes = dtypes
        self.offsets, self.nbytes = _layout([p.numel() * dtype.itemsize for p, dtype in zip(self.parameters, dtypes, strict=True)])
        self.layout += 1
        self._copies = self._copies_of.get(tuple(dtypes), {})
        self._copied: tuple[int, Stamp] | None = None

    def set_mode(self, mode: Mode) -> None:
        """Lets parameters travel as was decided for this mode."""
        # A weight in two halves is rounded by the device where it travels whole, and has been rounded already where its upper half does.
        # The two part at ties, so a call's backward sends it as its forward did.
        decided = mode.casting and (mode.decided or not self._has_halves)
        dtypes = self._dtypes_of_mode.get(mode.training, self._own_dtypes) if decided else self._own_dtypes
        if dtypes != self.dtypes:
            self._set_dtypes(dtypes)

    def replaced(self) -> list[str]:
        """Keys under which the module holds something else than its own parameters, as under `functional_call` or after pruning."""
        pairs = zip(self.parameters, self.places, strict=True)
        return [str(key) for parameter, places in pairs for container, key in places if _held(container, key) is not parameter]

    def first_forward(self) -> bool:
        """Whether the layer runs for the first time in its present mode, training or not."""
        first = self.module.training not in self._seen_modes
        self._seen_modes.add(self.module.training)
        return first

    def casts_undecided(self, training: bool) -> bool:
        """Whether the uses of the layer's weights in this mode have not been seen yet."""
        return training not in self._dtypes_of_mode

    def decide_casts(self, training: bool, cast_once: set[int]) -> None:
        """Lets parameters travel as BF16 from the next load on, in this mode.

        Evaluation may use other kernels than training, which take the weights as they are.

        Args:
            training: The mode.
            cast_once: Indices of FP32 parameters of which the only use was a cast to BF16.
        """
        self._dtypes_of_mode[training] = [torch.bfloat16 if index in cast_once else dtype for index, dtype in enumerate(self._own_dtypes)]

    def stamp(self) -> Stamp:
        """Changes when a parameter was written in a way that can be seen."""
        return tuple((p._version, p.data_ptr(), self.updates) for p in self.parameters)

    def sources(self, now: int) -> list[Tensor | OnTheWay]:
        """What to send for each parameter, in the dtypes in which they travel.

        Args:
            now: The clock; working copies made at another time are made again.
        """
        key = (now, self.stamp())
        if self._copied != key:
            # a copy made in inference mode could not be used in training
            with torch.inference_mode(False), torch.no_grad():
                if not self._copies:
                    self._copies = self._copies_of[tuple(self.dtypes)] = self._new_copies()
                seen = self._copied is not None and self._copied[0] == now  # nobody wrote but in ways that a version shows
                for index, copy in self._copies.items():
                    self._refresh(self.parameters[index], copy, seen)
            self._copied = key
        return [self._source(index, p) for index, p in enumerate(self.parameters)]

    def _refresh(self, parameter: Parameter, copy: Tensor, seen: bool) -> None:
        if self.copy_writer is None or (parameter.dtype, copy.dtype) != (torch.float32, torch.bfloat16) or not is_dense(parameter):
            copy.copy_(parameter.detach())
        elif not seen or not self.copy_writer.wrote(parameter, copy):
            self.copy_writer.set_working_copy(parameter, copy)

    def _source(self, index: int, parameter: Parameter) -> Tensor | OnTheWay:
        if index in self._copies:
            return self._copies[index]
        if self._on_the_way(index):
            return OnTheWay(parameter, self.dtypes[index], self._split if self.dtypes[index] is torch.float32 else None)
        return parameter.detach()

    def _on_the_way(self, index: int) -> bool:
        parameter = self.parameters[index]
        joined = self._split is not None and self._split.holds(parameter)
        return self.dtypes[index] != parameter.dtype and is_dense(parameter) and (joined or not self._keep_copies)

    def _new_copies(self) -> dict[int, Tensor]:
        copied = [
            index
            for index, (p, dtype) in enumerate(zip(self.parameters, self.dtypes, strict=True))
            if not is_dense(p) or (dtype != p.dtype and not self._on_the_way(index))
        ]
        if not copied:
            return {}
        sizes = [self.parameters[index].numel() * self.dtypes[index].itemsize for index in copied]
        offsets, nbytes = _layout(sizes)
        flat = self._allocate(nbytes)
        return {
            index: shaped(flat[offset : offset + size].view(self.dtypes[index]), self.parameters[index])
            for index, offset, size in zip(copied, offsets, sizes, strict=True)
        }

    @property
    def working_copy_bytes(self) -> int:
        """Host bytes of the copies that travel in the place of parameters."""
        return sum(copy.nbytes for copies in self._copies_of.values() for copy in copies.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that one backward of this layer sends to the host."""
        return sum(p.numel() * dtype.itemsize + ALIGNMENT for p, dtype in zip(self.parameters, self.dtypes, strict=True) if p.requires_grad)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a slot's flat uint8 `buffer`, one for each parameter, with its strides."""
        return [
            shaped(buffer[offset : offset + p.numel() * dtype.itemsize].view(dtype), p)
            for p, dtype, offset in zip(self.parameters, self.dtypes, self.offsets, strict=True)
        ]


def _held(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError):
        return None


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets at which tensors of `sizes` bytes lie one after another, aligned, and the bytes in all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in memory without gaps or overlaps, in any order of dimensions."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Views `flat` in the shape of `like`, and in its strides where these cover memory without gaps (kernels choose by them)."""
    if is_dense(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)
