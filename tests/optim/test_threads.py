"""The kernel's threads: their number, forks, steps at once, and Ctrl-C."""

import gc
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from lightning_megatrain.optim import HostAdamW, arithmetic, kernel
from lightning_megatrain.optim.arithmetic import PIECE, Update
from lightning_megatrain.optim.scalars import Scalars
from lightning_megatrain.optim.workers import Workers

SIZES = [PIECE + 5, 3 * PIECE, 7]


def make(threads: int | None) -> tuple[list[nn.Parameter], HostAdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return params, HostAdamW(params, lr=1e-2, threads=threads)


def expected(steps: int) -> list[torch.Tensor]:
    params, optimizer = make(1)
    for _ in range(steps):
        optimizer.step()
    return [p.detach() for p in params]


def same(params: list[nn.Parameter], steps: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(params, expected(steps), strict=True))


def test_the_number_of_threads_may_change_between_steps() -> None:
    params, optimizer = make(None)
    before = torch.get_num_threads()
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        optimizer.step()
    torch.set_num_threads(before)
    assert same(params, 3)


def test_two_optimizers_may_step_at_once() -> None:
    fields = [make(2) for _ in range(3)]
    threads = [threading.Thread(target=lambda o=o: [o.step() for _ in range(4)]) for _, o in fields]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(params, 4) for params, _ in fields)


def _step_and_compare(threads: int) -> None:
    params, optimizer = make(threads)
    optimizer.step()
    os._exit(0 if same(params, 1) else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_threads_of_its_own() -> None:
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    _, optimizer = make(3)
    optimizer.step()
    child = multiprocessing.get_context("fork").Process(target=_step_and_compare, args=(3,))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    optimizer.step()


def _interrupt_a_step() -> None:
    """Ends the process with 0 where Ctrl-C in the middle of a step is raised after the whole step and not before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # what is raised in one of its callbacks, of which hypothesis has one, is lost
    weight = nn.Parameter(torch.zeros(1 << 24))
    optimizer = HostAdamW([weight], lr=1.0, weight_decay=0.0, threads=2)
    weight.grad = torch.ones(1 << 24)
    begun, workers, version = threading.Event(), kernel._workers, weight._version

    def tell() -> Workers:
        begun.set()
        return workers()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    kernel._workers = tell  # type: ignore[assignment]
    threading.Thread(target=interrupt).start()
    try:
        optimizer.step()
        for _ in range(6000):  # a signal that comes after the step; another thread may take it, which would not end one long sleep
            time.sleep(0.01)
    except KeyboardInterrupt:
        os._exit(0 if bool((weight.detach() != 0).all()) and weight._version > version else 1)
    os._exit(2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_ctrl_c_leaves_no_thread_at_work_and_no_half_step() -> None:
    kernel.load()
    child = multiprocessing.get_context("fork").Process(target=_interrupt_a_step)
    child.start()
    child.join(300)
    assert child.exitcode == 0


def test_where_no_thread_can_begin_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    kernel._workers.cache_clear()
    params, optimizer = make(4)
    optimizer.step()
    kernel._workers.cache_clear()
    assert same(params, 1)


def test_ctrl_c_during_the_kernel_waits_for_the_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is seen when the kernel returns, and another thread may still be at its last piece then."""
    begun, ended = threading.Event(), threading.Event()

    class Library:
        def megatrain_host_adamw(self, *_: object) -> None:
            if threading.current_thread() is threading.main_thread():
                assert begun.wait(300)
                raise KeyboardInterrupt
            begun.set()
            threading.Event().wait(0.2)
            ended.set()

    monkeypatch.setattr(kernel, "load", Library)
    params, optimizer = make(2)
    versions = [p._version for p in params]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert ended.is_set()
    assert all(p._version > version for p, version in zip(params, versions, strict=True))


def test_ctrl_c_before_the_kernel_still_leaves_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object, job: object, times: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel.Workers, "hand_out", interrupted)
    params, optimizer = make(2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    assert same(params, 1)


def untouched(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory where they are written only; `torch.zeros` writes all of them."""
    return torch.from_numpy(np.zeros(n * dtype.itemsize, np.uint8)).view(dtype)


def test_places_beyond_two_to_the_31_are_reached() -> None:
    """Only the last piece of a tensor of 2^31 and some elements is updated here, and in torch."""
    n = (1 << 31) + PIECE + 100
    begin = (n - 1) // PIECE * PIECE
    try:
        update = Update(
            untouched(n, torch.bfloat16),
            untouched(n, torch.bfloat16),
            Scalars.of(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).defaults, 1, 1.0),
            seed=7,
            exp_avg=untouched(n, torch.int8),
            exp_avg_sq=untouched(n, torch.uint8),
            exp_avg_scale=untouched(-(-n // 256), torch.float32),
            exp_avg_sq_scale=untouched(-(-n // 256), torch.float32),
        )
    except MemoryError:
        pytest.skip("this machine promises no 13 GB of memory that are not used")
    torch.manual_seed(0)
    update.param[begin:] = torch.randn(n - begin)
    update.grad[begin:] = torch.randn(n - begin)
    written = ("param", "exp_avg", "exp_avg_sq")
    before = {name: getattr(update, name)[begin:].clone() for name in written}
    library = kernel.load()
    assert library is not None
    first = kernel.ctypes.c_int64(begin // PIECE)
    addresses = [t.data_ptr() for t in (update.param, update.grad, update.exp_avg, update.exp_avg_sq)]
    scale_addresses = [t.data_ptr() for t in (update.exp_avg_scale, update.exp_avg_sq_scale)]
    row = kernel.ROW.pack(n, addresses[0], 0, *addresses[1:], *scale_addresses, 0, 0, 1, 1, 3, update.seed, bytes(update.scalars))
    library.megatrain_host_adamw(row, 1, kernel.ctypes.byref(first))
    compiled = {name: getattr(update, name)[begin:].clone() for name in written}
    scales = update.exp_avg_scale[begin // 256 :].clone()
    for name in written:
        getattr(update, name)[begin:] = before[name]
    update.exp_avg_scale[begin // 256 :] = 0
    update.exp_avg_sq_scale[begin // 256 :] = 0
    arithmetic._step_piece(update, begin, n)
    for name in written:
        assert torch.equal(compiled[name].view(torch.uint8), getattr(update, name)[begin:].view(torch.uint8)), name
        assert not torch.equal(compiled[name].view(torch.uint8), before[name].view(torch.uint8)), name
    assert torch.equal(scales, update.exp_avg_scale[begin // 256 :])


@pytest.mark.skipif(kernel.load() is None, reason="torch's own threads are torch's affair")
@pytest.mark.parametrize("threads", [1, 3])
def test_numbers_below_the_least_normal_one_count_on_every_thread(threads: int) -> None:
    """`set_flush_denormal` holds for the calling thread and those it starts later: results depended on who had which piece."""
    ends = []
    for flush in (False, True):
        parameter = nn.Parameter(torch.ones(4 * PIECE))
        optimizer = HostAdamW([parameter], eps=0.0, threads=threads)
        gradient = torch.full((4 * PIECE,), 1e-21)
        optimizer.update([parameter], [gradient])
        try:
            if flush and not torch.set_flush_denormal(True):
                pytest.skip("this processor cannot flush")
            optimizer.update([parameter], [gradient])
            least = torch.tensor([1e-40]) * 0.5
        finally:
            torch.set_flush_denormal(False)
        assert (least.view(torch.int32).item() == 0) == flush, "the caller's own mode is as it was"
        ends.append((parameter.detach(), optimizer.state[parameter]["exp_avg_sq"]))
    (weight, moment), (other_weight, other_moment) = ends
    assert torch.equal(moment.view(torch.int32), other_moment.view(torch.int32))
    assert (moment > 0).all()
    assert torch.equal(weight, other_weight)


def test_threads_that_find_new_groups_at_once_agree_on_every_record() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(40)]
    optimizer = HostAdamW(params[:4], threads=1)
    stop = threading.Event()

    def step(parameter: nn.Parameter) -> None:
        while not stop.is_set():
            optimizer.update([parameter], [torch.ones(1)])

    threads = [threading.Thread(target=step, args=(parameter,)) for parameter in params[:4]]
    optimizer.allocate()
    for thread in threads:
        thread.start()
    copies = [torch.empty(1, dtype=torch.bfloat16) for _ in params]
    for parameter, copy in zip(params[4:], copies, strict=False):
        optimizer.add_param_group({"params": [parameter]})
        optimizer.set_working_copy(parameter, copy)
    stop.set()
    for thread in threads:
        thread.join()
    assert all(optimizer.wrote(parameter, copy) for parameter, copy in zip(params[4:], copies, strict=False))
