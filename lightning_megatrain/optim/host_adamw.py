"""HostAdamW: AdamW and Adam for parameters in host memory, in one pass over that memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import override

from lightning_megatrain.optim import kernel, saved_state, state
from lightning_megatrain.optim.checks import (
    check_apart,
    check_group,
    check_memory,
    check_options,
    check_parameter,
    check_working_copy,
    checked_gradient,
    describe,
)
from lightning_megatrain.optim.data_parallel import watch_data_parallel
from lightning_megatrain.optim.masters import join, split
from lightning_megatrain.optim.plan import Record, are_numbered, begin_step, first_row, number_records, valid_low_half

Masters = Literal["fp32", "split", "none"]


class HostAdamW(torch.optim.Optimizer):
    """AdamW (and Adam) over CPU parameters, at the speed of the memory.

    Takes the arguments of `torch.optim.AdamW` and gives its results to the last bits of a weight. One pass per step reads each gradient in
    its own dtype, scales it, updates the moments and the weight, and writes a BF16 working copy where one is kept. With Loshchilov &
    Hutter's decoupled decay (arXiv 1711.05101, algorithm 2) or, with `decoupled_weight_decay=False`, Kingma & Ba's Adam (arXiv 1412.6980).

    Host bytes a parameter, gradient excluded:

    | masters | moments | bytes |
    |---|---|---|
    | fp32 | fp32, bf16, int8 | 12, 8, 6.03 |
    | split | fp32, bf16, int8 | 12, 8, 6.03; 2 of them are the BF16 weight a device computes with, which costs "fp32" 2 more |

    Args:
        params: parameters, named parameters, or groups, as for any torch optimizer. They must be on the CPU and dense.
        lr: learning rate, read from the group at each step.
        betas: decay of the first and second moment per step.
        eps: added to the root of the second moment.
        weight_decay: decay per unit of learning rate (decoupled), or the L2 penalty.
        amsgrad: divide by the largest second moment so far (needs `moments="fp32"`; 4 bytes more).
        foreach: accepted for torch's sake and carried along; the kernel is always fused.
        maximize: climb instead of descend.
        capturable: must be False.
        differentiable: must be False.
        fused: as `foreach`.
        decoupled_weight_decay: False for Adam (torch's Adam also has `weight_decay=0` by default).
        masters: "fp32" takes FP32 parameters only. "split" also takes BF16 parameters and keeps the low 16 bits of each FP32 weight beside
            them (int16), so that they train exactly as FP32 would; their gradients accumulate in FP32 (`grad_dtype`). "none" also takes
            BF16 parameters and rounds each new weight to BF16, which loses updates below 1/256 of a weight. DistributedDataParallel
            cannot average FP32 gradients of BF16 parameters, and says so at its first forward.
        moments: "fp32", or "bf16" or "int8" (one byte, a scale for each 256 elements), both rounded stochastically. Under "int8" a NaN or
            infinite gradient spoils its block of 256.
        threads: CPU threads; torch's number when None. The numbers do not depend on it.

    Raises:
        ValueError: for a value out of range.
        TypeError: for a parameter of another dtype, device or layout than above.
    """

    next_grad_scale: float
    """Multiplies the gradients of the next `step`, and of that one only: a clip coefficient, found after `step` was called."""
    take_step: Callable[[list[Tensor], float], None]
    """What `step` does with the parameters that have gradients, and their scale; replaced by whoever updates at another time."""
    _incoming: dict[str, Any] | None = None  # a state dictionary on its way in

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        masters: Masters = "fp32",
        moments: state.Moments = "fp32",
        threads: int | None = None,
    ) -> None:
        check_options(masters, moments, threads)
        self.masters, self.moments, self.threads = masters, moments, threads
        self._reset_links()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group, self.moments)
            for parameter in group["params"]:
                check_parameter(parameter, self.masters)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self._accumulate_exactly(parameter)
        self._numbered = False

    @override
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and the gradients first, as for any torch optimizer.
            grad_scale: multiplies every gradient on the way, without writing it: a clip coefficient, one over a number of micro-batches.

        Returns:
            What the closure returned.

        Raises:
            TypeError: for a sparse gradient, or a parameter that left the CPU.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = grad_scale * self.next_grad_scale
        self.next_grad_scale = 1.0
        self._numbered = self._numbered and are_numbered(self.param_groups, self._records)  # someone may have moved parameters
        self.take_step([p for group in self.param_groups for p in group["params"] if p.grad is not None], scale)
        return loss

    @torch.compiler.disable  # a compiler takes the addresses it sees for constants
    @torch.no_grad()
    def update(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor] | None = None,
        *,
        grad_scale: float = 1.0,
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Take one step of some parameters: a layer whose gradients have landed. Hooks on `step` do not run.

        Threads may call it at once for different parameters, once `allocate` has made their state.

        Args:
            params: parameters of this optimizer.
            gradients: one for each, of its shape, FP32 or BF16; their `.grad` when None.
            grad_scale: multiplies every gradient.
            groups: hyperparameters to use instead of `param_groups`, in that order, such as copies taken when `step` was due.

        Raises:
            TypeError: for a sparse gradient, or a parameter or gradient outside the CPU.
            ValueError: for a parameter of no group, one that shares memory with another or was resized, a gradient of another shape, or
                one that is missing.
        """
        if not params:
            return
        groups = groups or self.param_groups
        known = self._records if self._numbered else {}
        records = [known.get(p) or self._record(p) for p in params]
        options = [(self.masters, group["amsgrad"]) for group in groups]
        grads: list[Any] = [p.grad for p in params] if gradients is None else list(gradients)
        states, none = self.state, state.State()
        rows: list[Any] = [
            r.form and r.form.row(p, g, states.get(p) or none, r.working_copy, options[r.group])
            for p, g, r in zip(params, grads, records, strict=True)
        ]
        changed = [number for number, row in enumerate(rows) if row is None]  # since they last passed all checks
        for number in changed:
            check_parameter(params[number], self.masters)
            check_memory("a parameter", params[number])
        check_apart(params)
        for number in changed:
            grads[number] = checked_gradient(params[number], grads[number])
        for number in changed:
            parameter, record = params[number], records[number]
            held = self._allocate(parameter, groups[record.group])
            rows[number] = first_row(record, parameter, grads[number], held, options[record.group])
        tensors = begin_step(rows, params, records, states, groups, grad_scale)
        try:
            kernel.run(tensors, self.threads or torch.get_num_threads())
        finally:  # Ctrl-C shows when the kernel is done
            increment_version(params)  # the kernel writes by address; autograd must know
            for parameter, record in zip(params, records, strict=True):
                record.version = parameter._version

    def allocate(self, params: Iterable[Tensor] | None = None) -> None:
        """Make the state of these parameters (all when None) where there is none: zeroed memory, touched at the first step.

        A state that is there already follows its parameter, whose dtype or layout someone may have changed.
        """
        for parameter in params if params is not None else chain.from_iterable(g["params"] for g in self.param_groups):
            self._allocate(parameter, self.param_groups[self._record(parameter).group])

    def set_working_copy(self, parameter: Tensor, copy: Tensor | None) -> None:
        """Keep a BF16 copy of an FP32 parameter: filled now, and rewritten by each step in the same pass (round to nearest even).

        Args:
            parameter: an FP32 parameter of this optimizer.
            copy: BF16, on the CPU, of its shape and strides; None to keep no more. Writing the parameter by other means does not update it.

        Raises:
            ValueError: if the two do not match.
        """
        record = self._record(parameter)
        if copy is None:
            record.working_copy = None
            return
        check_working_copy(copy, parameter)
        with torch.no_grad():
            copy.copy_(parameter)
        record.working_copy, record.version = copy, parameter._version

    def wrote(self, parameter: Tensor, copy: Tensor) -> bool:
        """Whether `copy` is the parameter's working copy and has its value: nobody else wrote the parameter in a way that can be seen."""
        record = self._records.get(parameter)
        return record is not None and record.working_copy is copy and record.version == parameter._version

    def master(self, parameter: Tensor) -> Tensor:
        """The exact FP32 value of a parameter, as a new tensor where the parameter is held in two halves, else the parameter's own."""
        if not self._is_split(parameter):
            return parameter.detach()
        return join(parameter.detach(), self.low_half(parameter))

    def low_half(self, parameter: Tensor) -> Tensor:
        """The low 16 bits (int16) of a parameter that is held in two halves.

        Zero once someone else has written the parameter, whose value is then the whole value.
        """
        self.allocate([parameter])
        return valid_low_half(parameter, self.state[parameter], self._record(parameter))

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Set a parameter to an exact FP32 value: both halves of a split one, else the parameter itself.

        Args:
            parameter: a parameter of this optimizer.
            value: FP32, of its shape.
        """
        record = self._record(parameter)
        if self._is_split(parameter):
            self.allocate([parameter])
            high, low = split(torch.empty_like(parameter, dtype=torch.float32).copy_(value))
            parameter.copy_(high)
            self.state[parameter]["master_low"].copy_(low)
            record.version = parameter._version
        else:
            parameter.copy_(value)
        if record.working_copy is not None:
            record.working_copy.copy_(parameter)

    @override
    def state_dict(self, *, masters: bool = True) -> dict[str, Any]:
        """The state as torch's AdamW would give it: per parameter "step", "exp_avg", "exp_avg_sq" (FP32 or BF16), "max_exp_avg_sq".

        It differs in two things. Split parameters add "master", their exact FP32 value (a new tensor). 8-bit moments are left as they are,
        under "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales": exact and small, but torch's AdamW refuses
        them; `full_state_dict` converts.

        Args:
            masters: False leaves "master" out, for whoever saves the exact weights elsewhere.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if self.state.get(parameter):
                self.low_half(parameter) if self._is_split(parameter) else self.allocate([parameter])
        packed = super().state_dict()
        packed["state"] = {k: saved_state.exported(parameters[k], s, masters) for k, s in packed["state"].items()}
        return packed

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with every moment in FP32, for `torch.optim.AdamW.load_state_dict`; costs 8 bytes a parameter if they are not."""
        packed = self.state_dict()
        packed["state"] = {k: saved_state.with_full_moments(s) for k, s in packed["state"].items()}
        return packed

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this optimizer, in any of its forms, or torch's AdamW or Adam saved; load the model's weights first.

        Values are copied into this optimizer's own memory and form (torch would cast FP32 moments to a BF16 parameter's dtype, and keep
        the loaded tensors). A "master" becomes the parameter's exact value, if it rounds to the weight the parameter has; if not, the
        weight stays and a warning says so.

        Args:
            state_dict: a state dictionary of as many groups and parameters.

        Raises:
            ValueError: if groups or shapes do not match, or hyperparameters have no meaning here; nothing is changed then.
        """

        def keep_tensors(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            groups = [{**self.defaults, **group, "capturable": False, "differentiable": False} for group in loaded["param_groups"]]
            for group in groups:
                check_group(group, self.moments)
            self._incoming = {**loaded, "param_groups": groups}
            return {**self._incoming, "state": {}}

        handle = self.register_load_state_dict_pre_hook(keep_tensors)  # registered last, it sees what the user's hooks made
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._incoming = None

    @override
    def __setstate__(self, new: dict[str, Any]) -> None:
        if self._incoming is not None:  # within load_state_dict
            new = {**new, "state": self._imported(self._incoming)}
            self._incoming = None
        super().__setstate__(new)
        if "_records" not in self.__dict__:  # unpickled, or a deep copy
            self._reset_links()
            for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
                self._accumulate_exactly(parameter)
        self._numbered = False
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @override
    def __getstate__(self) -> dict[str, Any]:
        for parameter, record in list(self._records.items()):  # whoever reads it has no record of who wrote the weight last
            if self._is_split(parameter) and "master_low" in self.state.get(parameter, {}):
                valid_low_half(parameter, self.state[parameter], record)
        return {**super().__getstate__(), "masters": self.masters, "moments": self.moments, "threads": self.threads}

    def _reset_links(self) -> None:
        self.next_grad_scale = 1.0
        self.take_step = self._update_at_once
        self._records: dict[Tensor, Record] = {}
        self._numbered = False  # whether the records are those of the groups

    def _update_at_once(self, params: list[Tensor], grad_scale: float) -> None:
        self.update(params, grad_scale=grad_scale)

    def _is_split(self, parameter: Tensor) -> bool:
        return self.masters == "split" and parameter.dtype == torch.bfloat16

    def _accumulate_exactly(self, parameter: Tensor) -> None:
        """Have autograd sum the gradients of a split parameter in FP32."""
        if self._is_split(parameter):
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient if gradient is None else gradient.float()
            watch_data_parallel()

    def _record(self, parameter: Tensor) -> Record:
        if not (self._numbered and parameter in self._records):
            number_records(self.param_groups, self._records)
            self._numbered = True
            if parameter not in self._records:
                raise ValueError(f"parameter {describe(parameter)} is in none of this optimizer's groups; see add_param_group")
        return self._records[parameter]

    def _allocate(self, parameter: Tensor, group: dict[str, Any]) -> state.State:
        low = self._is_split(parameter)
        held = self.state[parameter] = saved_state.fitting(parameter, self.state[parameter], self.moments, group, low=low)
        return held

    def _imported(self, loaded: dict[str, Any]) -> defaultdict[Tensor, state.State]:
        keys = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        pairs = [(parameter, loaded["state"].get(key)) for key, parameter in zip(keys, parameters, strict=True)]
        for parameter, saved in pairs:
            if saved:
                saved_state.check_saved(parameter, saved)
        states: defaultdict[Tensor, state.State] = defaultdict(dict)
        for parameter, saved in pairs:
            own, low = self.state.get(parameter, {}), self._is_split(parameter)
            exact = self.low_half(parameter) if "master_low" in own and low else None
            if saved:
                states[parameter] = saved_state.taken_in(parameter, own, saved, self.moments, low=low, exact=exact)
                self._record(parameter).version = parameter._version
            elif exact is not None:  # of a step that is still to come, but of the weight that is there
                states[parameter] = state.new(parameter, self.moments, amsgrad=False, low=True) | {"master_low": exact}
        return states
