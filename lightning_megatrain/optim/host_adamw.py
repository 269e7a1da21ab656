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
from lightning_megatrain.optim.arithmetic import Update
from lightning_megatrain.optim.checks import check_apart, check_group, check_parameter, checked_gradient, describe, same_layout
from lightning_megatrain.optim.masters import join, split
from lightning_megatrain.optim.scalars import Scalars

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
            BF16 parameters and rounds each new weight to BF16, which loses updates below 1/256 of a weight.
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
        if masters not in ("fp32", "split", "none"):
            raise ValueError(f'masters is "fp32", "split" or "none", not {masters!r}')
        if moments not in ("fp32", "bf16", "int8"):
            raise ValueError(f'moments is "fp32", "bf16" or "int8", not {moments!r}')
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}; None takes torch.get_num_threads()")
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
            if self._is_split(parameter):
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = torch.float32
                parameter.grad = gradient if gradient is None else gradient.float()
        self._places.clear()

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
        self.take_step([p for group in self.param_groups for p in group["params"] if p.grad is not None], scale)
        return loss

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
        for parameter in params:
            check_parameter(parameter, self.masters)
        check_apart(params)
        arrived = [p.grad for p in params] if gradients is None else gradients
        grads = [checked_gradient(p, g) for p, g in zip(params, arrived, strict=True)]
        self.allocate(params)
        updates = self._plan(params, grads, grad_scale, groups or self.param_groups)
        try:
            kernel.run([u for u in updates if u.param.numel()], self.threads or torch.get_num_threads())
        finally:  # Ctrl-C shows when the kernel is done
            increment_version(params)  # the kernel writes by address; autograd must know
            for parameter in params:
                self._versions[parameter] = parameter._version

    def allocate(self, params: Iterable[Tensor] | None = None) -> None:
        """Make the state of these parameters (all when None) where there is none: zeroed memory, touched at the first step.

        A state that is there already follows its parameter, whose dtype or layout someone may have changed.
        """
        for parameter in params if params is not None else chain.from_iterable(g["params"] for g in self.param_groups):
            group = self.param_groups[self._place(parameter)[0]]
            held, low = self.state[parameter], self._is_split(parameter)
            moments = state.moments_form(held) if held else self.moments
            if group["amsgrad"] and moments != "fp32":
                check_group(group, moments)
            if not held:
                self.state[parameter] = state.new(parameter, moments, amsgrad=group["amsgrad"], low=low)
                continue
            if not state.lies_like(held, parameter):
                held = self.state[parameter] = saved_state.laid_like(parameter, held)
            if group["amsgrad"] and "max_exp_avg_sq" not in held:
                held["max_exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            if low and "master_low" not in held:  # the parameter was FP32 until now
                held["master_low"] = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
            elif not low:
                held.pop("master_low", None)

    def set_working_copy(self, parameter: Tensor, copy: Tensor | None) -> None:
        """Keep a BF16 copy of an FP32 parameter: filled now, and rewritten by each step in the same pass (round to nearest even).

        Args:
            parameter: an FP32 parameter of this optimizer.
            copy: BF16, on the CPU, of its shape and strides; None to keep no more. Writing the parameter by other means does not update it.

        Raises:
            ValueError: if the two do not match.
        """
        self._place(parameter)
        if copy is None:
            self._working_copies.pop(parameter, None)
            return
        dtypes = (parameter.dtype, copy.dtype)
        if dtypes != (torch.float32, torch.bfloat16) or copy.device.type != "cpu" or not same_layout(parameter, copy):
            raise ValueError(
                f"a working copy is BF16 and of an FP32 parameter's shape and strides on the CPU: parameter {describe(parameter)}, "
                f"copy {describe(copy)}; torch.empty_like(parameter, dtype=torch.bfloat16) makes one"
            )
        with torch.no_grad():
            copy.copy_(parameter)
        self._working_copies[parameter], self._versions[parameter] = copy, parameter._version

    def wrote(self, parameter: Tensor, copy: Tensor) -> bool:
        """Whether `copy` is the parameter's working copy and has its value: nobody else wrote the parameter in a way that can be seen."""
        return self._working_copies.get(parameter) is copy and self._versions.get(parameter) == parameter._version

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
        return self._valid_low_half(parameter)

    @torch.no_grad()
    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Set a parameter to an exact FP32 value: both halves of a split one, else the parameter itself.

        Args:
            parameter: a parameter of this optimizer.
            value: FP32, of its shape.
        """
        if self._is_split(parameter):
            self.allocate([parameter])
            high, low = split(torch.empty_like(parameter, dtype=torch.float32).copy_(value))
            parameter.copy_(high)
            self.state[parameter]["master_low"].copy_(low)
            self._versions[parameter] = parameter._version
        else:
            parameter.copy_(value)
        if parameter in self._working_copies:
            self._working_copies[parameter].copy_(parameter)

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
        if "_places" not in self.__dict__:  # unpickled, or a deep copy
            self._reset_links()
        self._places.clear()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "masters": self.masters, "moments": self.moments, "threads": self.threads}

    def _reset_links(self) -> None:
        self.next_grad_scale = 1.0
        self.take_step = self._update_at_once
        self._places: dict[Tensor, tuple[int, int]] = {}  # parameter -> its group, and its number among all
        self._working_copies: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}  # of each parameter when we last wrote it

    def _update_at_once(self, params: list[Tensor], grad_scale: float) -> None:
        self.update(params, grad_scale=grad_scale)

    def _is_split(self, parameter: Tensor) -> bool:
        return self.masters == "split" and parameter.dtype == torch.bfloat16

    def _valid_low_half(self, parameter: Tensor) -> Tensor:
        low: Tensor = self.state[parameter]["master_low"]
        if self._versions.setdefault(parameter, parameter._version) != parameter._version:
            low.zero_()
            self._versions[parameter] = parameter._version
        return low

    def _working_copy(self, parameter: Tensor) -> Tensor | None:
        copy = self._working_copies.get(parameter)
        if copy is not None and not (parameter.dtype == torch.float32 and same_layout(parameter, copy)):
            del self._working_copies[parameter]  # it is of what the parameter was
            return None
        return copy

    def _place(self, parameter: Tensor) -> tuple[int, int]:
        if parameter not in self._places:
            pairs = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"]]
            self._places = {p: (i, number) for number, (p, i) in enumerate(pairs)}
            if parameter not in self._places:
                raise ValueError(f"parameter {describe(parameter)} is in none of this optimizer's groups; see add_param_group")
        return self._places[parameter]

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
            if not saved:
                if exact is not None:  # of a step that is still to come, but of the weight that is there
                    states[parameter] = state.new(parameter, self.moments, amsgrad=False, low=True) | {"master_low": exact}
                continue
            if not own or not state.lies_like(own, parameter):
                own = state.new(parameter, self.moments, amsgrad=False, low=low)
                if exact is not None:
                    own["master_low"].copy_(exact)
            saved_state.imported(parameter, own, saved)
            self._versions[parameter] = parameter._version
            states[parameter] = own
        return states

    def _plan(self, params: Sequence[Tensor], grads: list[Tensor], grad_scale: float, groups: Sequence[dict[str, Any]]) -> list[Update]:
        """Count the step and lay out each parameter's update; `scalars` are shared by all that are at the same step of the same group."""
        torch._foreach_add_([self.state[p]["step"] for p in params], 1)
        scalars: dict[tuple[int, int], Scalars] = {}
        updates = []
        for parameter, gradient in zip(params, grads, strict=True):
            held, (group_number, number) = self.state[parameter], self._place(parameter)
            group, t = groups[group_number], int(held["step"].item())
            if (group_number, t) not in scalars:
                scalars[group_number, t] = Scalars.of(group, t, grad_scale)
            updates.append(
                Update(
                    parameter,
                    gradient,
                    scalars[group_number, t],
                    (t * 0x9E3779B1 + number * 0x85EBCA6B) & 0xFFFFFFFF,
                    *state.moment_tensors(held),
                    low=self._valid_low_half(parameter) if "master_low" in held else None,  # as `allocate` has it
                    max_exp_avg_sq=held["max_exp_avg_sq"] if group["amsgrad"] else None,
                    working_copy=self._working_copy(parameter),
                )
            )
        return updates
