"""What an operator called on "emu" tensors does: its shape now, its numbers later.

The first time an operator meets a signature (shapes, strides, dtypes, other arguments) it is tried on zeros of that signature, which tells
exactly what the CPU kernel returns: views, its own arguments, or new tensors of which layout. A call then allocates the outputs and queues
the kernel on the compute lane. Views act at once. What cannot be known without the numbers waits for the lane first, as on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tests.emulated.device import DEVICE
from tests.emulated.kernels import kernel
from tests.emulated.memory import Block
from tests.emulated.queues import on_raw_memory
from tests.emulated.tensor import EmulatedTensor, allocate

aten = torch.ops.aten
HOST_INDICES_ALLOWED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
UNINITIALIZED = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
HANDLERS: dict[str, Callable[..., Any]] = {}  # operators that the general rule does not fit; see transfers.py
COMPOSITE: dict[str, Callable[..., Any]] = {}  # operators made of others in our own way; see operators.py


class Operator:
    """What is true of an operator whatever it is called with. torch takes longer to say it than to add two small tensors."""

    def __init__(self, func: Any) -> None:
        schema, tags = func._schema, func.tags
        self.name: str = schema.name
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        made_of_others = has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")
        # those that torch makes of others reach us whole in inference mode, and from inside a dispatch mode
        self.composite = COMPOSITE.get(func.name()) or (func.decompose if made_of_others else None)
        self.handler = HANDLERS.get(self.name)
        self.kernel = kernel(func)
        self.mutates: bool = schema.is_mutable
        returns_views = bool(schema.returns) and all(output.alias_info is not None for output in schema.returns)
        self.is_view = returns_views and not self.mutates and str(schema.arguments[0].type) == "Tensor"
        self.allocates_only = self.name in UNINITIALIZED
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.gives_numbers = torch.Tag.data_dependent_output in tags
        self.gives_any_shape = torch.Tag.dynamic_output_shape in tags
        self.takes_host_indices = self.name in HOST_INDICES_ALLOWED
        self.takes_host_scalars = torch.Tag.pointwise in tags or any(
            word in self.name for word in ("fill", "foreach", "fused", "index_put", "scatter")
        )


_operator = cache(Operator)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operator; `__torch_dispatch__` of every emu tensor, and the kernel behind `torch.empty(..., device="emu")`."""
    operator = _operator(func)
    if operator.composite is not None:
        return operator.composite(*args, **kwargs)
    with on_raw_memory():
        if operator.handler is not None:
            return operator.handler(func, *args, **kwargs)
        if operator.is_view and isinstance(args[0], EmulatedTensor):
            block = args[0].block
            return tree_map(lambda raw: EmulatedTensor(raw, block), func(args[0].raw, *args[1:], **kwargs))
        device = kwargs.get("device")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        call = Call(func, args, kwargs)
        if device is not None and torch.device(device).type != "emu":  # zeros_like(emu_tensor, device="cpu"): reads only the shape
            return func(*call.args, device=device, **call.kwargs)
        if operator.is_random:
            return call.run_random()
        return call.run()


@dataclass
class Fresh:
    """An output in new memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Alias:
    """An output that lies in the memory of the call's tensor number `index`."""

    index: int


NEEDS_NUMBERS = object()  # the plan of a call whose outputs cannot be known without running it
_plans: dict[Any, Any] = {}


class Call:
    """An operator with its arguments brought down to raw memory."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.operator = _operator(func)
        self.tensors: list[EmulatedTensor | None] = []  # one for each tensor among the arguments, None for a scalar from the host
        self.raws: list[Tensor] = []
        self.host_tensors: list[Tensor] = []
        key: list[Any] = [self.operator, torch.get_default_dtype()]
        self.args = self._lower(args, key)
        names = sorted(kwargs)
        self.kwargs = {name: self._lower(kwargs[name], key) for name in names}
        key.extend(names)
        self.key = tuple(key)
        if self.host_tensors and any(tensor is not None for tensor in self.tensors):
            indexed = self.operator.takes_host_indices and self.tensors[0] is not None
            if not indexed:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, emu:0 and cpu!"
                    f" ({self.operator.name} got a cpu tensor of shape {tuple(self.host_tensors[0].shape)})"
                )

    def _lower(self, value: Any, key: list[Any]) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, EmulatedTensor):
                raw = value.raw
                self.tensors.append(value)
            else:
                raw = value.detach().clone()  # a scalar's value is read when the kernel is launched
                self.tensors.append(None)
                if value.dim() > 0 or not self.operator.takes_host_scalars:
                    self.host_tensors.append(value)
            self.raws.append(raw)
            key.append((raw.dtype, raw.size(), raw.stride()))
            return raw
        if isinstance(value, (list, tuple)):
            key.append(len(value))
            return [self._lower(item, key) for item in value]
        key.append((type(value), value))
        return value

    def run(self) -> Any:
        """Makes the outputs and queues the work that fills them."""
        if self._depends_on_numbers():
            return self.run_now()
        plan = _plans.get(self.key)
        if plan is None:
            plan = _plans[self.key] = self._probe()
        if plan is NEEDS_NUMBERS:
            return self.run_now()
        return self._follow(plan)

    def run_random(self) -> Any:
        """As `run`; the generator moves on at once, and the work draws later from where the generator stood at the call."""
        state = torch.get_rng_state()
        plan = self._probe(fill=1)
        if plan is NEEDS_NUMBERS:
            torch.set_rng_state(state)
            return self.run_now()

        return self._follow(plan, state)

    def run_now(self) -> Any:
        """Waits for the compute lane, then runs on its numbers."""
        DEVICE.compute.flush()
        shapes = [(raw.size(), raw.stride()) for raw in self.raws]
        result = self.bound()()
        for tensor, raw, shape in zip(self.tensors, self.raws, shapes, strict=True):
            if tensor is not None and (raw.size(), raw.stride()) != shape:
                raise NotImplementedError(f"{self.operator.name} gave an emu tensor another shape in place")

        def wrap(output: Tensor) -> Tensor:
            index = self._aliased(output, self.raws)
            if index is None:
                return EmulatedTensor(output, Block(output, DEVICE.compute, DEVICE.memory))
            return self._wrap_alias(index, output)

        return tree_map(wrap, result)

    def bound(self) -> Callable[[], Any]:
        """Returns the kernel with its arguments; it holds raw memory, never an emu tensor: queued work keeps no allocation alive."""
        return partial(self.operator.kernel, *self.args, **self.kwargs)

    def _depends_on_numbers(self) -> bool:
        if self.operator.gives_numbers:
            return True
        if not self.operator.gives_any_shape:
            return False
        return self.operator.name != "aten::index" or any(raw.dtype in (torch.bool, torch.uint8) for raw in self.raws[1:])

    def _probe(self, fill: int = 0) -> Any:
        """Tries the operator on numbers that do not matter, to learn what it returns."""
        stand_ins = {id(raw): _stand_in(raw, fill) for raw in self.raws}
        args, kwargs = (tree_map(lambda raw: stand_ins[id(raw)], value) for value in (self.args, list(self.kwargs.values())))
        try:
            result = self.operator.kernel(*args, **dict(zip(self.kwargs, kwargs, strict=True)))
        except Exception:  # these numbers were unfit, or the call is wrong: the real numbers will tell
            return NEEDS_NUMBERS
        dummies = [stand_ins[id(raw)] for raw in self.raws]
        resized = {
            index: Fresh(dummy.size(), dummy.stride(), dummy.dtype)
            for index, (dummy, raw) in enumerate(zip(dummies, self.raws, strict=True))
            if dummy.size() != raw.size() or dummy.stride() != raw.stride()
        }
        plan = []
        for output in leaves(result):
            if not isinstance(output, Tensor):
                return NEEDS_NUMBERS
            index = self._aliased(output, dummies)
            if index is None and any(step == 0 and length > 1 for step, length in zip(output.stride(), output.size(), strict=True)):
                return NEEDS_NUMBERS
            plan.append(Fresh(output.size(), output.stride(), output.dtype) if index is None else Alias(index))
        shape = tree_map(lambda _: 0, result)
        if (
            not self.operator.mutates
            and any(isinstance(output, Alias) for output in plan)
            and any(isinstance(output, Fresh) for output in plan)
        ):
            return NEEDS_NUMBERS
        return shape, plan, resized

    def _aliased(self, output: Tensor, inputs: list[Tensor]) -> int | None:
        address = output.untyped_storage()._cdata
        return next((i for i, raw in enumerate(inputs) if raw.untyped_storage()._cdata == address), None)

    def _wrap_alias(self, index: int, output: Tensor) -> Tensor:
        tensor = self.tensors[index]
        if tensor is None:
            return EmulatedTensor(output, Block(output, DEVICE.compute, DEVICE.memory))
        return EmulatedTensor(output, tensor.block) if output is not tensor.raw else tensor

    def _follow(self, plan: Any, rng_state: Tensor | None = None) -> Any:
        shape, outputs, resized = plan
        for index, new in resized.items():
            self._resize(index, new)
        if not self.operator.mutates and outputs and all(isinstance(output, Alias) for output in outputs):
            views = iter(outputs)
            return tree_map(lambda raw: self._wrap_alias(next(views).index, raw), self.bound()())
        if shape == 0 and isinstance(outputs[0], Fresh) and not (self.operator.allocates_only or self.operator.is_random):
            tensor = allocate(outputs[0].size, outputs[0].stride, outputs[0].dtype, written_by_next=True)
            DEVICE.compute.add(partial(_fill, tensor.raw, self.operator.kernel, self.args, self.kwargs))
            return tensor  # most calls go this way, which is the shortest
        made: list[Tensor] = []
        filled: list[tuple[int, Tensor]] = []  # (number of the output, raw memory it goes to)
        for number, output in enumerate(outputs):
            if isinstance(output, Alias):
                made.append(self._argument(output.index))
            else:
                tensor = allocate(output.size, output.stride, output.dtype, written_by_next=not self.operator.allocates_only)
                made.append(tensor)
                filled.append((number, tensor.raw))

        if not self.operator.allocates_only:
            DEVICE.compute.add(_work(self.bound(), filled, rng_state))
        makes = iter(made)
        return tree_map(lambda _: next(makes), shape, is_leaf=lambda leaf: leaf == 0)

    def _resize(self, index: int, new: Fresh) -> None:
        """Gives an `out=` argument that does not fit the memory it needs."""
        tensor, old = self._argument(index), self.raws[index]
        made = allocate(new.size, new.stride, new.dtype, written_by_next=True)
        tensor.become(made.raw, made.block)
        self.args = tree_map(lambda raw: made.raw if raw is old else raw, self.args)
        self.kwargs = {name: tree_map(lambda raw: made.raw if raw is old else raw, value) for name, value in self.kwargs.items()}
        self.raws[index] = made.raw

    def _argument(self, index: int) -> EmulatedTensor:
        tensor = self.tensors[index]
        if tensor is None:
            raise RuntimeError(f"{self.operator.name} would write a cpu scalar")
        return tensor


def _fill(raw: Tensor, kernel: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> None:
    raw.copy_(kernel(*args, **kwargs))


def _work(execute: Callable[[], Any], filled: list[tuple[int, Tensor]], rng_state: Tensor | None) -> Callable[[], None]:
    """Returns what runs in the lane: `execute`, drawing from `rng_state`, and the move of its new outputs to where they were promised."""

    def work() -> None:
        later = torch.get_rng_state() if rng_state is not None else None
        if rng_state is not None:
            torch.set_rng_state(rng_state)
        try:
            results = leaves(execute())
        finally:
            if later is not None:
                torch.set_rng_state(later)
        for number, raw in filled:
            raw.copy_(results[number])

    return work


def _stand_in(raw: Tensor, fill: int) -> Tensor:
    last = sum((length - 1) * step for length, step in zip(raw.size(), raw.stride(), strict=True)) if raw.numel() else -1
    return torch.full((raw.storage_offset() + last + 1,), fill, dtype=raw.dtype).as_strided(raw.size(), raw.stride(), raw.storage_offset())


def leaves(value: Any) -> list[Any]:
    """Returns what `value` holds, in order, without None."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]


def tree_map(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor)) -> Any:
    """Applies `function` to the tensors of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        mapped = [tree_map(function, item, is_leaf) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value) if is_leaf(value) else value
