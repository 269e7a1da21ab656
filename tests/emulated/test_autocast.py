"""`torch.autocast("emu")` casts what `torch.autocast("cpu")` casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated import EmulatedTensor

CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "mm": lambda x, w: torch.mm(x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "conv2d": lambda x, w: F.conv2d(x[None, None], w[None, None, :3, :3]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], x[None, None], is_causal=True),
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (8,), w[0]),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w[0]),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "log_softmax": lambda x, w: (x @ w).log_softmax(-1),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(8, device=x.device)),
    "nll_loss": lambda x, w: F.nll_loss(x @ w, torch.arange(8, device=x.device)),
    "mse_loss": lambda x, w: F.mse_loss(x @ w, x),
    "bce": lambda x, w: F.binary_cross_entropy_with_logits(x @ w, x.sigmoid()),
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "stack": lambda x, w: torch.stack([x @ w, x]),
    "gelu": lambda x, w: F.gelu(x @ w),
    "prod": lambda x, w: (x @ w).prod(),
    "twice": lambda x, w: F.linear(F.linear(x, w), w),
}


def _run(case: Callable[[Tensor, Tensor], Tensor], device: str) -> list[Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(8, 8).to(device).requires_grad_() for _ in range(2))
    with torch.autocast(device, torch.bfloat16):
        out = case(x, w)
    out.float().sum().backward()
    return [tensor.detach().cpu() for tensor in (out, x.grad, w.grad) if tensor is not None]


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_dtypes_are_the_cpus(name: str) -> None:
    for expected, found in zip(_run(CASES[name], "cpu"), _run(CASES[name], "emu"), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_every_operator_that_the_cpu_casts_is_cast() -> None:
    registered = {
        name for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastPrivateUse1") if name.startswith("aten::")
    }
    assert registered == set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))


class _Casts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.cast: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.cast.append(args[0])
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_cast_of_the_weight_itself_once() -> None:
    layer = nn.Linear(8, 8, bias=False).to("emu")
    x = torch.randn(8, 8).to("emu")
    with _Casts() as casts, torch.autocast("emu", torch.bfloat16):
        layer(layer(x))
    assert isinstance(layer.weight, EmulatedTensor)
    assert [tensor is layer.weight for tensor in casts.cast].count(True) == 1


def test_autocast_can_be_switched_off_inside() -> None:
    x = torch.randn(8, 8).to("emu")
    with torch.autocast("emu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with torch.autocast("emu", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32
