"""Adam's direction for one sample, as LESS takes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Classes that make Adam's step. NAdam, RAdam and others keep state of the same names and step another way.
_ADAM = {"Adam", "AdamW", "HostAdamW", "DeepSpeedCPUAdam", "FusedAdam"}


@dataclass
class AdamMoments:
    """What Adam knows of one parameter: its moments (R, C), its settings, and how many steps it has made."""

    m_RC: Tensor
    v_RC: Tensor
    beta1: float
    beta2: float
    eps: float
    steps: int

    def direction(self, gradient_Brc: Tensor, rows_r: Tensor, columns: slice) -> Tensor:
        r"""Returns the update Adam would make for each sample alone, per unit of learning rate, (B, r, c).

        LESS (arXiv 2402.04333), section 2.2, with t the number of the coming step and eps inside the root:

            Gamma = m' / sqrt(v' + eps),  m' = (beta1 m + (1 - beta1) g) / (1 - beta1^t),  v' = (beta2 v + (1 - beta2) g^2) / (1 - beta2^t)

        The published code leaves the two denominators out, which scales m' and changes v' against eps only; DataFlex also takes eps outside
        the root.
        """
        t = self.steps + 1
        where = rows_r.to(self.m_RC.device)
        m_rc = self.m_RC[where][:, columns].to(gradient_Brc)
        v_rc = self.v_RC[where][:, columns].to(gradient_Brc)
        first = (self.beta1 * m_rc + (1 - self.beta1) * gradient_Brc) / (1 - self.beta1**t)
        second = (self.beta2 * v_rc + (1 - self.beta2) * gradient_Brc**2) / (1 - self.beta2**t)
        return first / (second + self.eps).sqrt()


def not_adam(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Returns what makes the step of one of an optimizer's groups another than Adam's, empty where it is Adam's."""
    others = [option for option in ("amsgrad", "maximize") if group.get(option)]
    if others:
        return others[0]
    return "" if _ADAM & {cls.__name__ for cls in type(optimizer).__mro__} else type(optimizer).__name__


def adam_moments(optimizers: Iterable[Optimizer], named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, AdamMoments]:
    """Returns the state that the optimizers hold of each parameter; zero moments for one that has had no gradient yet.

    Args:
        optimizers: those that train the parameters. Each must keep `exp_avg` and `exp_avg_sq` (Adam, AdamW).
        named: names and parameters.

    Raises:
        ValueError: when an optimizer is not Adam (or with `amsgrad` or `maximize`), has made no step, keeps other state, or does not hold
            one of the parameters.
    """
    optimizers = [getattr(o, "optimizer", o) for o in optimizers]  # Lightning's wrapper holds the optimizer itself
    owners = {id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    moments: dict[str, AdamMoments] = {}
    for name, parameter in named:
        if id(parameter) not in owners:
            raise ValueError(
                f"No optimizer holds `{name}`, so it has no Adam state. Leave it out with `parameters=`, or use preconditioner=None."
            )
        optimizer, group = owners[id(parameter)]
        if kind := not_adam(optimizer, group):
            raise ValueError(
                f"preconditioner='adam' needs plain Adam or AdamW state, but `{name}` is trained by {kind}. Use preconditioner=None."
            )
        if not optimizer.state:
            raise ValueError(
                "preconditioner='adam' needs the optimizer's state, but it has made no step yet. Train first (warmup_steps >= 1)."
            )
        state = optimizer.state.get(parameter) or {}
        if state and not {"exp_avg", "exp_avg_sq"} <= state.keys():
            raise ValueError(
                f"preconditioner='adam' needs `exp_avg` and `exp_avg_sq`, but {type(optimizer).__name__} keeps {sorted(map(str, state))} "
                f"for `{name}`. "
                "Use torch's AdamW or HostAdamW with moments='fp32' or 'bf16', or preconditioner=None."
            )
        shape = (parameter.shape[0], -1) if parameter.dim() > 1 else (-1, 1)
        zeros = torch.zeros_like(parameter, dtype=torch.float32) if not state else None
        beta1, beta2 = group["betas"]
        moments[name] = AdamMoments(
            m_RC=(zeros if zeros is not None else state["exp_avg"]).detach().reshape(shape),
            v_RC=(zeros if zeros is not None else state["exp_avg_sq"]).detach().reshape(shape),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            steps=int(state["step"]) if state else 0,
        )
    return moments
