"""Bytes are counted as a GPU's allocator and bus would count them."""

import gc

import pytest
import torch

from tests.emulated import EmulatedLanes, PageLocks, emulated_device


def test_live_and_peak_bytes_of_a_computation_made_by_hand() -> None:
    gc.collect()
    with emulated_device() as device:
        before = device.live_bytes
        a = torch.empty(100, device="emu")  # 400
        b = a.view(10, 10)[2:4]  # a view
        c = a + 1  # 400
        del a
        assert device.live_bytes - before == 800
        del b  # the last view of the first block
        assert device.live_bytes - before == 400
        d = (c * 2).to(torch.bfloat16)  # 400 that die, 200 that stay
        assert device.live_bytes - before == 600
        assert device.peak_bytes - before == 1000
        del c, d
        device.reset_counters()
        assert device.peak_bytes == before


def test_autograd_frees_what_it_saved() -> None:
    gc.collect()
    with emulated_device() as device:
        before = device.live_bytes
        w = torch.ones(10, 10, device="emu", requires_grad=True)  # 400
        loss = w.exp().exp().sum()  # both exponentials are saved: 800, and 4
        assert device.live_bytes - before == 1204
        loss.backward()
        assert device.live_bytes - before == 400 + 400 + 4  # the weight, its gradient, the loss


def test_queued_work_keeps_no_memory_alive() -> None:
    gc.collect()
    with emulated_device("lazy") as device:
        before = device.live_bytes
        x = torch.ones(10, device="emu")
        for _ in range(5):
            x = x * 2
        assert len(device.compute.items) > 5
        assert device.live_bytes - before == 40
        assert x.tolist() == [32.0] * 10


def test_bytes_over_the_bus() -> None:
    with emulated_device() as device:
        lanes = EmulatedLanes(torch.device("emu"))
        slot = lanes.allocate(400).view(torch.float32)
        source, result = torch.ones(100), torch.empty(100)
        lanes.weights.copy(slot, source)
        lanes.gradients.copy(result, slot)
        _ = torch.ones(3).to("emu").cpu()
        assert (device.to_device_bytes, device.to_host_bytes) == (412, 412)


def test_page_locks_run_out_and_come_back() -> None:
    locks = PageLocks(limit=100)
    assert locks.lock(4096, 60)
    assert not locks.lock(8192, 50)
    assert not locks.lock(4100, 10)  # overlaps
    assert locks.locked_bytes == 60
    locks.unlock(4096)
    assert locks.lock(8192, 100)
    with pytest.raises(KeyError):
        locks.unlock(4096)
