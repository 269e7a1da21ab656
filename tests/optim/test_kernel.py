"""The compiled kernel computes what its specification in torch computes, bit for bit."""

import ctypes
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatrain.optim import HostAdamW, kernel
from lightning_megatrain.optim.arithmetic import PIECE

run_kernel = kernel.run
Run = Callable[[ctypes.Array], None]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="compares builds of the kernel, which takes a C compiler")
forms = st.fixed_dictionaries(
    {
        "masters": st.sampled_from(["fp32", "split", "none"]),
        "moments": st.sampled_from(["fp32", "bf16", "int8"]),
        "gradient": st.sampled_from([torch.float32, torch.bfloat16]),
        "decoupled": st.booleans(),
        "amsgrad": st.booleans(),
        "copy": st.booleans(),
        "maximize": st.booleans(),
    }
)


def in_torch(tensors: ctypes.Array) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "load", lambda: None)
        run_kernel(tensors, 1)


def compiled(tensors: ctypes.Array) -> None:
    assert kernel.load() is not None
    run_kernel(tensors, 1)


def trajectory(run: Run, form: dict[str, object], sizes: list[int], seed: int = 0, steps: int = 3) -> list[Tensor]:
    """Everything that some steps write, as bits."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]
    if form["masters"] != "fp32":
        for parameter in params:
            parameter.data = parameter.data.bfloat16()
    amsgrad = bool(form["amsgrad"]) and form["moments"] == "fp32"
    optimizer = HostAdamW(
        params,
        lr=1e-2,
        masters=form["masters"],
        moments=form["moments"],
        amsgrad=amsgrad,
        decoupled_weight_decay=form["decoupled"],
        maximize=form["maximize"],
    )
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in params if form["copy"] and p.dtype == torch.float32]
    for parameter, copy in zip(params, copies, strict=False):
        optimizer.set_working_copy(parameter, copy)
    for _ in range(steps):
        # Three orders of magnitude, and some zeros.
        grads = [torch.randn(n, generator=generator) * 10 ** -torch.randint(0, 4, (n,), generator=generator).float() for n in sizes]
        grads = [(g * (torch.rand(g.shape, generator=generator) > 0.1)).to(form["gradient"]) for g in grads]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "run", lambda tensors, _: run(tensors))
            optimizer.update(params, grads, grad_scale=0.7)
    written = [t for p in params for t in (p.detach(), *optimizer.state[p].values())] + copies
    return [t.contiguous().view(-1).view(torch.uint8) for t in written]


@settings(max_examples=60)
@given(form=forms, sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3), seed=st.integers(0, 1 << 30))
@pytest.mark.filterwarnings("ignore:masters=")
def test_the_kernel_and_its_specification_agree_bit_for_bit(form: dict[str, object], sizes: list[int], seed: int) -> None:
    for ours, theirs in zip(trajectory(compiled, form, sizes, seed), trajectory(in_torch, form, sizes, seed), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_the_result_does_not_depend_on_the_number_of_threads(moments: str) -> None:
    form = {"masters": "split", "moments": moments, "gradient": torch.bfloat16, "decoupled": True, "amsgrad": False, "copy": False}
    form["maximize"] = False
    sizes = [PIECE + 1, 2 * PIECE + 300, 5]  # some pieces whole, some not, in several tensors
    alone = trajectory(compiled, form, sizes, steps=2)
    for threads in (2, 3, 16):
        together = trajectory(lambda tensors, threads=threads: run_kernel(tensors, threads), form, sizes, steps=2)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="function clones exist on x86-64 only")
def test_every_clone_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    levels = ["x86-64", *(["x86-64-v3"] if "avx2" in flags else []), *(["x86-64-v4"] if "avx512vl" in flags else [])]
    source = Path(kernel.__file__).with_name("host_adamw.c")
    results = []
    for level in levels:
        library = tmp_path / f"{level}.so"
        options = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-DNO_CLONES"]
        subprocess.run(["cc", *options, f"-march={level}", source, "-o", library, "-lm"], check=True)
        monkeypatch.setattr(kernel, "LIBRARY", library)
        kernel.load.cache_clear()
        bits = []
        for moments, masters, gradient in (
            ("fp32", "split", torch.bfloat16),
            ("bf16", "split", torch.float32),
            ("int8", "fp32", torch.bfloat16),
            ("fp32", "fp32", torch.float32),
        ):
            form = {"masters": masters, "moments": moments, "gradient": gradient, "decoupled": False, "amsgrad": True, "copy": True}
            bits += trajectory(compiled, form | {"maximize": False}, [1000, 77])
            bits += trajectory(compiled, form | {"maximize": True, "decoupled": True, "amsgrad": False}, [1000, 77])
        results.append(bits)
    kernel.load.cache_clear()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_without_the_kernel_the_numbers_are_the_same_and_one_warning_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"masters": "split", "moments": "fp32", "gradient": torch.bfloat16, "decoupled": True, "amsgrad": False, "copy": False}
    expected = trajectory(compiled, form | {"maximize": False}, [300])
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "missing.so")
    kernel.load.cache_clear()
    with pytest.warns(UserWarning, match="without its compiled kernel.*numbers are the same.*C compiler") as warned:
        actual = trajectory(lambda tensors: run_kernel(tensors, 1), form | {"maximize": False}, [300])
    kernel.load.cache_clear()
    assert len(warned) == 1
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ROW", struct.Struct(kernel.ROW.format + "d"))
    kernel.load.cache_clear()
    with pytest.warns(UserWarning, match="built from another version"):
        assert kernel.load() is None
    kernel.load.cache_clear()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_spoils_its_own_weight_only(value: float, moments: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(600, dtype=dtype))
        optimizer = HostAdamW([weight], masters="split", moments=moments)
        weight.grad = torch.ones(600)
        weight.grad[300] = value
        optimizer.step()
        assert weight.isnan().nonzero().tolist() == [[300]]


def test_a_nan_of_any_payload_is_not_lost_in_two_halves() -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, -0x400000, 0x7F8FFFFF], dtype=torch.int32)
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight], masters="split")
    weight.grad = bits.view(torch.float32)
    optimizer.step()
    assert weight.isnan().all()
    assert optimizer.master(weight).isnan().all()
