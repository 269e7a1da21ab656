"""Page-locking in place, and what happens when the system refuses it."""

import functools
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_megatrain.engine import Engine, pinning, transfer
from lightning_megatrain.engine.pinning import PAGE, LockedMemory, copy_read_only
from lightning_megatrain.engine.report import report
from tests.emulated import PageLocks, emulated_device
from tests.engine.models import Tower, loss_of, tokens


def test_ranges_are_whole_pages_that_cover_every_tensor_once() -> None:
    locks = PageLocks()
    memory = LockedMemory(locks)
    tensors = [torch.zeros(size) for size in (3, 5000, 1, 700_000, 17)]
    memory.lock([*tensors, tensors[1][10:20]])
    assert all(memory.holds(tensor) for tensor in tensors)
    assert all(address % PAGE == 0 and nbytes % PAGE == 0 for address, nbytes in locks.locked.items())
    assert locks.locked_bytes == memory.locked_bytes == memory.wanted_bytes
    memory.close()
    assert not locks.locked


def test_allocated_buffers_are_locked_and_begin_on_a_page() -> None:
    memory = LockedMemory(PageLocks())
    buffer = memory.allocate(10_000)
    assert memory.holds(buffer)
    assert (buffer.data_ptr() % PAGE, buffer.nbytes) == (0, 10_000)
    memory.close()


def test_without_a_locker_nothing_is_locked_and_nothing_fails() -> None:
    memory = LockedMemory(None)
    tensor = torch.zeros(10)
    memory.lock([tensor])
    assert not memory.holds(tensor)
    assert memory.allocate(100).nbytes == 100


def train(device: str) -> tuple[list[torch.Tensor], str]:
    torch.manual_seed(0)
    model = Tower(layers=4, width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine(model, device) as engine:
        for seed in range(2):
            loss_of(model, tokens(seed, device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        text = report(engine, [optimizer])
    return [p.detach().clone() for p in model.parameters()], text


@pytest.mark.parametrize("limit", [0, 3 * PAGE, 40 * PAGE, 70 * PAGE, None])
@pytest.mark.parametrize("policy", ["lazy", "eager:weights", "random:1"])
def test_refused_after_any_number_of_bytes_the_numbers_are_the_same(
    limit: int | None, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pinning.PAGE_LOCKERS, "emu", functools.partial(PageLocks, limit))
    monkeypatch.setattr(pinning, "_LARGEST_RANGE", 8 * PAGE)
    monkeypatch.setattr(transfer, "RING_BUFFER_BYTES", PAGE)
    expected, _ = train("cpu")
    with emulated_device(policy):
        found, text = train("emu")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert "page-locked: " in text
    assert ("ulimit -l" in text) == (limit is not None)


def test_a_read_only_map_is_copied_before_it_is_locked(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(torch.arange(4096, dtype=torch.float32).numpy().tobytes())
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    with pytest.warns(UserWarning, match="not writable"):
        weight = nn.Parameter(torch.frombuffer(mapped, dtype=torch.float32))
    own = nn.Parameter(torch.ones(4096))
    own_address = own.data_ptr()
    assert copy_read_only([weight, own]) == weight.nbytes
    with torch.no_grad():
        weight.add_(1)  # would end the process on the map
    assert torch.equal(weight, torch.arange(4096, dtype=torch.float32) + 1)
    assert own.data_ptr() == own_address
