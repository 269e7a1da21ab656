"""The emulated lanes show a missing wait or a missing owner as a wrong number, and nothing wrong where none is missing."""

import threading

import pytest
import torch
from torch import Tensor

from tests.emulated import DEVICE, EmulatedLanes, emulated_device
from tests.emulated.queues import Event

LAYERS, SIZE = 4, 64
WAITS = ("slot allocated", "weights arrived", "slot read", "gradient computed", "gradient arrived", "staging read")
POLICIES = [
    "lazy",
    "eager:weights",
    "eager:gradients",
    "eager:weights,gradients",
    "eager:compute",
    *(f"random:{seed}" for seed in range(8)),
]


def _stream(layers: list[Tensor], x: Tensor) -> list[Tensor]:
    """Streams layers through one slot and their results out: the engine's schedule in small, with every wait and owner it needs."""
    lanes = EmulatedLanes(torch.device("emu"))
    slot = lanes.allocate(SIZE * 4).view(torch.float32)
    staging, results = torch.zeros(SIZE), [torch.zeros(SIZE) for _ in layers]
    slot_free, slot_reason = lanes.compute.record(), "slot allocated"
    staging_read = None
    arrived = []
    for layer, result in zip(layers, results, strict=True):
        if staging_read is not None:
            lanes.synchronize(staging_read, "staging read")
        staging.copy_(layer)
        lanes.weights.wait(slot_free, slot_reason)
        lanes.weights.copy(slot, staging)
        staging_read = lanes.weights.record()
        lanes.compute.wait(staging_read, "weights arrived")
        gradient = (slot * x + 1).sin()
        slot_free, slot_reason = lanes.compute.record(), "slot read"
        lanes.gradients.wait(slot_free, "gradient computed")
        lanes.gradients.copy(result, gradient)
        event = lanes.gradients.record()
        held = lanes.gradients.hold([gradient], "gradient leaving")
        arrived.append((event, held))
        if len(arrived) > 2:
            early, owner = arrived[-3]
            lanes.compute.wait(early, "gradient left")
            owner.release()
        del gradient
    for event, _ in arrived:
        lanes.synchronize(event, "gradient arrived")
    return [result.clone() for result in results]


def _run(policy: str, **without: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    layers, x = [torch.randn(SIZE) for _ in range(LAYERS)], torch.randn(SIZE)
    with emulated_device(policy, **without):
        found = _stream(layers, x.to("emu"))
    return found, [(layer * x + 1).sin() for layer in layers]


def _wrong(policy: str, **without: str) -> bool:
    found, expected = _run(policy, **without)
    return not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_complete_schedule_is_right_in_every_order(policy: str) -> None:
    assert not _wrong(policy)


@pytest.mark.parametrize("reason", WAITS)
def test_each_missing_wait_shows_in_some_order(reason: str) -> None:
    assert any(_wrong(policy, without_wait=reason) for policy in POLICIES)


def test_a_missing_owner_shows_in_some_order() -> None:
    assert any(_wrong(policy, without_owner="gradient leaving") for policy in POLICIES)


def test_an_owner_released_before_compute_waits_shows() -> None:
    assert any(_wrong(policy, without_wait="gradient left") for policy in POLICIES)


@pytest.mark.parametrize(
    ("reason", "policy"),
    [
        ("slot allocated", "eager:weights"),
        ("weights arrived", "lazy"),
        ("slot read", "eager:weights"),
        ("gradient computed", "eager:gradients"),
        ("gradient arrived", "lazy"),
        ("staging read", "lazy"),
        ("gradient left", "eager:compute"),
    ],
)
def test_the_order_in_which_a_missing_wait_shows_is_known(reason: str, policy: str) -> None:
    assert _wrong(policy, without_wait=reason)


def test_reasons_are_recorded() -> None:
    with emulated_device() as device:
        _stream([torch.randn(SIZE) for _ in range(LAYERS)], torch.randn(SIZE).to("emu"))
        assert device.waits_seen == {*WAITS, "gradient left"}
        assert device.owners_seen == {"gradient leaving"}


def test_a_random_order_is_the_same_for_the_same_seed() -> None:
    runs = [_run("random:3", without_wait="weights arrived")[0] for _ in range(2)]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*runs, strict=True))


def test_freed_memory_is_poisoned_in_the_order_of_the_compute_lane() -> None:
    with emulated_device("lazy"):
        lanes, host = EmulatedLanes(torch.device("emu")), torch.zeros(4)
        freed = torch.ones(4, device="emu")
        computed = lanes.compute.record()
        lanes.gradients.wait(computed, "computed")
        lanes.gradients.copy(host, freed)
        del freed
        torch.ones(1, device="emu").item()  # compute passes the point where the memory was let go
        lanes.synchronize(lanes.gradients.record(), "arrived")
    assert host.isnan().all()


def test_host_memory_is_read_when_the_copy_runs() -> None:
    with emulated_device("lazy"):
        lanes, host = EmulatedLanes(torch.device("emu")), torch.ones(4)
        slot = torch.empty(4, device="emu")
        lanes.weights.wait(lanes.compute.record(), "allocated")
        lanes.weights.copy(slot, host)
        host.fill_(2)
        lanes.compute.wait(lanes.weights.record(), "arrived")
        assert slot.tolist() == [2.0] * 4


def test_host_memory_freed_before_the_copy_ran_is_read_as_nan_and_never_written() -> None:
    with emulated_device("lazy"):
        lanes = EmulatedLanes(torch.device("emu"))
        slot = torch.zeros(4, device="emu")
        lanes.weights.wait(lanes.compute.record(), "allocated")
        lanes.weights.copy(slot, torch.ones(4))
        lanes.compute.wait(lanes.weights.record(), "arrived")
        assert slot.isnan().all()
        lanes.gradients.copy(torch.ones(4), slot)
        with pytest.raises(RuntimeError, match="host memory that has been freed"):
            lanes.synchronize(lanes.gradients.record(), "arrived")


def test_two_threads_queue_at_once() -> None:
    found: list[float] = []

    def work() -> None:
        x = torch.ones(3, device="emu")
        for _ in range(200):
            x = x + 1
        found.append(x.sum().item())

    with emulated_device("random:1"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [603.0] * 4


def test_waiting_for_an_event_that_was_never_recorded_raises() -> None:
    lanes = EmulatedLanes(torch.device("emu"))
    with pytest.raises(RuntimeError, match="never recorded"):
        lanes.compute.wait(Event(), "nothing")
    with pytest.raises(RuntimeError, match="never recorded"):
        lanes.synchronize(Event(), "nothing")


def test_an_exception_leaves_no_work_behind() -> None:
    def stop() -> None:
        with emulated_device("lazy"):
            _ = torch.ones(3, device="emu") + 1
            raise KeyError

    with pytest.raises(KeyError):
        stop()
    assert DEVICE.scheduler.queues == [DEVICE.compute]
    assert (torch.ones(3, device="emu") + 1).tolist() == [2.0] * 3


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="no scheduling policy"), emulated_device("hasty"):
        pytest.fail("the device took the policy")
