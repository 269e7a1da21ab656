"""Tensors of device "emu" behave as a GPU's: placement, views, versions, random numbers, threads."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.emulated import DEVICE, EmulatedTensor, emulated_device


def test_host_and_device_tensors_do_not_mix() -> None:
    x = torch.ones(3, device="emu")
    for call in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3) + x,
        lambda: x.add_(torch.ones(3)),
        lambda: torch.cat([x, torch.ones(3)]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()
    with pytest.raises(RuntimeError, match="same device"):
        F.embedding(torch.tensor(1), torch.ones(3, 3, device="emu"))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3)[torch.tensor([0], device="emu")]
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # a host scalar may mix
    assert x[torch.tensor([0, 2])].tolist() == [1.0] * 2  # host indices may, as on CUDA


def test_a_host_scalar_is_read_when_the_operator_is_called() -> None:
    with emulated_device("lazy"):
        x, scalar = torch.ones(3, device="emu"), torch.tensor(1.0)
        y = x + scalar
        scalar.fill_(5)
        assert y.tolist() == [2.0] * 3


def test_slots_are_views_of_flat_bytes() -> None:
    buffer = torch.zeros(128, dtype=torch.uint8, device="emu")
    weight = buffer[0:64].view(torch.float32).view(4, 4)
    half = buffer[64:96].view(torch.bfloat16).view(4, 4)
    weight.fill_(1)
    half.copy_(weight * 2)
    assert buffer[:64].view(torch.float32).tolist() == [1.0] * 16
    assert buffer[64:96].view(torch.bfloat16).tolist() == [2.0] * 16
    assert weight._version == buffer._version == half._version == 2
    assert weight.block is buffer.block


def test_a_saved_tensor_changed_in_place_is_found() -> None:
    x = torch.ones(3, device="emu", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_runs_in_the_devices_thread() -> None:
    threads = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            threads.append(threading.get_ident())
            return gradient * 2

    x = torch.ones(3, device="emu", requires_grad=True)
    Noted.apply(x).sum().backward()
    assert threads[0] != threading.get_ident()
    assert x.grad.tolist() == [2.0] * 3


def test_copies_both_ways_and_in_place() -> None:
    host = torch.arange(6.0).view(2, 3)
    x = torch.empty(2, 3, device="emu")
    assert x.copy_(host) is x
    back = torch.empty(2, 3)
    assert torch.equal(back.copy_(x), host)
    assert torch.equal(x.t().cpu(), host.t())
    assert x.to("cpu", torch.float64).dtype == torch.float64
    assert x.to(torch.bfloat16).device.type == "emu"
    assert x.to("emu") is x


def test_a_copy_to_the_host_that_does_not_block_has_to_be_waited_for() -> None:
    with emulated_device("lazy"):
        x = torch.ones(3, device="emu") * 2
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()
        torch.emu.synchronize()
        assert host.tolist() == [2.0] * 3


def test_data_set_and_resize_change_a_tensor_in_place() -> None:
    p = nn.Parameter(torch.ones(2, 2, device="emu"))
    p.data = torch.zeros(3, device="emu")
    assert (p.shape, p.tolist()) == ((3,), [0.0] * 3)
    p.data.fill_(4)
    assert p.tolist() == [4.0] * 3
    x, y = torch.ones(2, device="emu"), torch.zeros(4, device="emu")
    x.set_(y)
    x.fill_(3)
    assert y.tolist() == [3.0] * 4
    x.resize_(2, 2)
    assert x.tolist() == [[3.0] * 2] * 2
    assert torch.add(y, 1, out=torch.empty(0, device="emu")).tolist() == [4.0] * 4


def test_a_module_moves_and_keeps_its_ties() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    weight = net["a"].weight
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for device in ("emu", "cpu", "emu"):
        net.to(device)
        assert net["a"].weight is net["b"].weight is weight
        assert optimizer.param_groups[0]["params"][0] is weight
        assert weight.device.type == device
    assert copy.deepcopy(net)["a"].weight.device.type == "emu"
    assert net.bfloat16()["a"].weight.dtype == torch.bfloat16


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "rand": lambda x: torch.rand(5, device=x.device),
    "randn_like": lambda x: torch.randn_like(x),
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randperm": lambda x: torch.randperm(7, device=x.device),
    "randint": lambda x: torch.randint(0, 9, (5,), device=x.device),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2),
    "attention dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.4),
    "dropout2d": lambda x: F.dropout2d(x[None, None], 0.4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_the_cpus_and_come_in_the_order_of_the_calls(name: str, dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "emu"):
        torch.manual_seed(0)
        x = torch.randn(4, 6, dtype=dtype).to(device).requires_grad_()
        state = torch.get_rng_state()
        first, second = RANDOM[name](x), RANDOM[name](x)
        host = torch.rand(3)  # the host draws while the device's work still waits
        torch.set_rng_state(state)
        again = RANDOM[name](x)
        if again.requires_grad:
            again.sum().backward()
        results.append([t.detach().cpu() for t in (first, second, host, again, x.grad) if t is not None])
        assert torch.equal(results[-1][0], results[-1][3])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_depends_on_numbers_waits_for_them() -> None:
    with emulated_device("lazy"):
        x = torch.tensor([1.0, -1.0, 2.0], device="emu") * 2
        assert x[x > 0].tolist() == [2.0, 4.0]
        assert torch.nonzero(x > 0).tolist() == [[0], [2]]
        assert (x.sum() > 3).item()
        assert bool((x == x).all())
        assert torch.equal(x, x.clone())
        assert f"{x.sum():.1f}" == "4.0"


def test_an_index_out_of_range_is_reported_when_the_work_runs() -> None:
    table = torch.ones(3, 2, device="emu")
    with emulated_device("lazy"):
        rows = F.embedding(torch.tensor([7], device="emu"), table)
        with pytest.raises(IndexError):
            rows.cpu()


def test_inference_mode() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.LayerNorm(4))
    x = torch.randn(2, 4)
    expected = layer(x)
    layer = copy.deepcopy(layer).to("emu")
    with torch.inference_mode():
        assert torch.equal(layer(x.to("emu")).cpu(), expected)


def test_text_and_identity() -> None:
    x = torch.ones(2, device="emu")
    assert repr(x) == "tensor([1., 1.], device='emu:0')"
    assert isinstance(x, EmulatedTensor)
    assert torch.emu.memory_allocated() == DEVICE.live_bytes
    assert x.data_ptr() == x.view(2, 1).data_ptr() != 0
    assert not torch.ones(2).pin_memory().is_cuda
    assert x.device == torch.device("emu", 0)
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        x.numpy()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
def test_optimizers_equal_the_cpus(optimizer: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    weights = []
    for device in ("cpu", "emu"):
        torch.manual_seed(0)
        net = nn.Linear(4, 4).to(device)
        opt = optimizer(net.parameters(), lr=0.1, **options)
        for _ in range(3):
            net(torch.ones(2, 4, device=device)).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        weights.append(net.weight.detach().cpu())
    assert torch.equal(*weights)


def test_a_transfer_that_does_not_block_reads_host_memory_when_it_runs() -> None:
    with emulated_device("lazy"):
        host = torch.ones(3)
        late, now = host.to("emu", non_blocking=True), host.to("emu")
        host.fill_(2)
        assert (late.tolist(), now.tolist()) == ([2.0] * 3, [1.0] * 3)


def test_shapes_without_numbers() -> None:
    x = torch.ones(2, 3, device="emu")
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert x.to("meta").shape == (2, 3)
    assert x.new_zeros(4).tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_equal_the_cpus(kind: type[nn.RNNBase]) -> None:
    net, x = kind(8, 8, num_layers=2, batch_first=True), torch.randn(2, 5, 8)
    found = []
    for device in ("cpu", "emu"):
        copied = copy.deepcopy(net).to(device)
        copied(x.to(device))[0].square().mean().backward()
        found.append([parameter.grad.cpu() for parameter in copied.parameters()])
    for expected, gradient in zip(*found, strict=True):
        torch.testing.assert_close(
            gradient, expected, rtol=1e-5, atol=1e-7
        )  # the CPU's LSTM is one fused kernel, with sums in another order


def test_a_backward_inside_a_backward_runs_in_the_same_thread() -> None:
    threads = []

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            threads.append(threading.get_ident())
            (x,) = ctx.saved_tensors
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                y = leaf.exp()
                y.register_hook(lambda _: threads.append(threading.get_ident()))
            torch.autograd.backward([y], [gradient], inputs=[leaf])
            return leaf.grad

    with emulated_device("lazy"):
        x = torch.ones(3, device="emu", requires_grad=True)
        Recomputed.apply(Recomputed.apply(x)).sum().backward()
        assert torch.allclose(x.grad.cpu(), torch.full((3,), torch.e**torch.e * torch.e))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
