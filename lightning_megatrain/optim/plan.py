"""What HostAdamW remembers of a parameter, so that a step looks only for what has changed since the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array, c_char, c_float, create_string_buffer
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import Parameter

from lightning_megatrain.optim import moments as codes
from lightning_megatrain.optim.checks import check_memory, describe, is_made_of_others, is_working_copy
from lightning_megatrain.optim.kernel import FORMS, ROW, SPLIT
from lightning_megatrain.optim.scalars import Scalars
from lightning_megatrain.optim.state import State, moment_names

Row = list[int]
"""The fields of `kernel.ROW` up to the forms, and then the address of "step"."""
_PARAM, _LOW, _GRAD, _M, _V, _M_SCALE, _V_SCALE, _V_MAX, _COPY, _PARAM_FORM, _GRAD_FORM = range(1, 12)
Options = tuple[str, bool]
"""`masters` and `amsgrad`."""
_WORKING_COPY = "working copy"  # in place of a name in the state

# One `isinstance` with a legacy type of torch asks for dtype, layout and device at once.
_FP32, _BF16, _INT16 = torch.FloatTensor, torch.BFloat16Tensor, torch.ShortTensor
_TYPES: dict[torch.dtype, type[Tensor]] = {
    torch.float32: _FP32,
    torch.bfloat16: _BF16,
    torch.int8: torch.CharTensor,
    torch.uint8: torch.ByteTensor,
}


@dataclass(slots=True)
class Record:
    """What HostAdamW remembers of a parameter between two steps.

    Attributes:
        group: the index of its group.
        number: its index among all parameters.
        version: its `_version` when the optimizer last wrote it; None before.
        working_copy: a BF16 copy to write with it.
        form: of the parameter and all that belongs to it when they last passed all checks; None before.
    """

    group: int = 0
    number: int = 0
    version: int | None = None
    working_copy: Tensor | None = None
    form: Form | None = None


class Form:
    """How a parameter, its gradient, state and working copy lie in memory.

    Neither tensors nor addresses are kept, as something else may lie there tomorrow: every step asks the tensors that there are.

    Args:
        parameter: a parameter that has passed all checks.
        held: its state, which has too.
        copy: its working copy.
        options: what they have passed under.
    """

    __slots__ = ("_options", "_others", "_row", "_shape", "_stride", "_type", "_with_copy")

    def __init__(self, parameter: Tensor, held: State, copy: Tensor | None, options: Options) -> None:
        self._options, self._with_copy, self._type = options, copy is not None, _TYPES[parameter.dtype]
        self._shape, self._stride = parameter.shape, None if parameter.is_contiguous() else parameter.stride()
        m, v = moment_names(held)
        low, small = "master_low" in held, held[m].dtype == torch.int8
        like_parameter, a_block = (self._shape, self._stride), (Size([codes.block_count(parameter.numel())]), None)
        known: list[tuple[bool, int, str, type[Tensor], tuple[Size, tuple[int, ...] | None]]] = [
            (low, _LOW, "master_low", _INT16, like_parameter),
            (True, _M, m, _TYPES[held[m].dtype], like_parameter),
            (True, _V, v, _TYPES[held[v].dtype], like_parameter),
            (small, _M_SCALE, "exp_avg_scales", _FP32, a_block),
            (small, _V_SCALE, "exp_avg_sq_scales", _FP32, a_block),
            (options[1], _V_MAX, "max_exp_avg_sq", _FP32, like_parameter),
            (self._with_copy, _COPY, _WORKING_COPY, _BF16, like_parameter),
        ]
        self._others = [(place, name, kind, *layout) for there, place, name, kind, layout in known if there]
        self._row: Row = [parameter.numel(), *[0] * 9, SPLIT if low else FORMS[parameter.dtype], 0, FORMS[held[m].dtype]]

    def row(self, parameter: Tensor, gradient: Tensor | None, held: State, copy: Tensor | None, options: Options) -> Row | None:
        """The addresses as they are now; None where anything is not as it was, and all checks have to be made again."""
        shape, stride = self._shape, self._stride
        if not (
            self._options == options
            and self._with_copy is (copy is not None)
            and isinstance(parameter, self._type)
            and (isinstance(gradient, _FP32) or isinstance(gradient, _BF16))  # noqa: SIM101 - a tuple takes longer
            and (type(gradient) is Tensor or not is_made_of_others(gradient))
            and (type(parameter) is Parameter or not is_made_of_others(parameter))
            and parameter.shape == shape == gradient.shape
            and (parameter.is_contiguous() if stride is None else parameter.stride() == stride)
            and (gradient.is_contiguous() if stride is None else gradient.stride() == stride)
            and not parameter.is_inference()
        ):
            return None
        row = self._row.copy()
        row[_PARAM], row[_GRAD], row[_GRAD_FORM] = parameter.data_ptr(), gradient.data_ptr(), FORMS[gradient.dtype]
        none = row[0] == 0  # of elements; all else has an address, unless its memory was given back or never was
        if not (none or (row[_PARAM] and row[_GRAD])):
            return None
        for place, name, kind, shape, stride in self._others:
            tensor = held.get(name) if name is not _WORKING_COPY else copy
            if not (
                isinstance(tensor, kind)
                and tensor.shape == shape
                and (tensor.is_contiguous() if stride is None else tensor.stride() == stride)
            ):
                return None
            address = row[place] = tensor.data_ptr()
            if not (address or none):
                return None
        step = held.get("step")
        if not (isinstance(step, _FP32) and step.numel() == 1):
            return None
        row.append(step.data_ptr())
        return row if row[-1] else None


def valid_low_half(parameter: Tensor, held: State, record: Record) -> Tensor:
    """The low half of a split parameter, set to zero if someone else wrote the parameter, whose value is then the whole value."""
    low: Tensor = held["master_low"]
    if record.version != parameter._version:
        if record.version is not None:
            low.zero_()
        record.version = parameter._version
    return low


def number_records(groups: Sequence[Mapping[str, Any]], records: dict[Tensor, Record]) -> None:
    """Give each parameter's record its place among the groups, make those that are missing, and drop those of no group.

    In place, and in this order, so that no parameter loses its record: threads may be at steps, and may number at once.
    """
    before = list(records)
    params = [(parameter, index) for index, group in enumerate(groups) for parameter in group["params"]]
    for place, (parameter, index) in enumerate(params):
        record = records.setdefault(parameter, Record())
        record.group, record.number = index, place
    for parameter in set(before).difference(parameter for parameter, _ in params):
        records.pop(parameter, None)


def are_numbered(groups: Sequence[Mapping[str, Any]], records: Mapping[Tensor, Record]) -> bool:
    """Whether the records are those of the groups as they are now."""
    found = [(records.get(p), index) for index, group in enumerate(groups) for p in group["params"]]
    return len(found) == len(records) and all(record is not None and record.group == index for record, index in found)


def first_row(record: Record, parameter: Tensor, gradient: Tensor, held: State, options: Options) -> Row:
    """The row of a parameter that has just passed all checks, as its state and gradient have, whose form is remembered.

    Raises:
        TypeError: somebody else put other tensors into the state.
    """
    copy = record.working_copy
    if copy is not None and not is_working_copy(copy, parameter):
        copy = record.working_copy = None  # it is of what the parameter was
    record.form = Form(parameter, held, copy, options)
    row = record.form.row(parameter, gradient, held, copy, options)
    if row is None:
        for name, value in {**held, _WORKING_COPY: copy}.items():
            if isinstance(value, Tensor):
                check_memory(name, value)
        kinds = ", ".join(f"{name} {describe(value)}" for name, value in held.items())
        raise TypeError(f"{kinds} are in no form of HostAdamW's; load a state with load_state_dict()")
    return row


def begin_step(
    rows: Sequence[Row],
    params: Sequence[Tensor],
    records: Sequence[Record],
    states: Mapping[Tensor, State],
    groups: Sequence[Mapping[str, Any]],
    grad_scale: float,
) -> Array[c_char]:
    """Lay out the kernel's tensors and then count the step; those at the same step of the same group share its scalars."""
    shared: dict[tuple[int, int], bytes] = {}
    tensors = create_string_buffer(ROW.size * len(rows))
    place, pack_into = 0, ROW.pack_into
    counts: list[tuple[c_float, int]] = []
    for row, parameter, record in zip(rows, params, records, strict=True):
        count = c_float.from_address(row.pop())  # an operator of torch takes ten times as long
        t = int(count.value) + 1
        counts.append((count, t))
        scalars = shared.get((record.group, t))
        if scalars is None:
            scalars = shared[record.group, t] = bytes(Scalars.of(groups[record.group], t, grad_scale))
        pack_into(tensors, place, *row, (t * 0x9E3779B1 + record.number * 0x85EBCA6B) & 0xFFFFFFFF, scalars)
        place += ROW.size
        if row[_PARAM_FORM] == SPLIT:
            valid_low_half(parameter, states[parameter], record)
    for count, t in counts:  # when nothing can fail any more
        count.value = t
    return tensors
