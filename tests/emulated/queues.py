"""Ordered queues of deferred work, and the scheduler that decides which of them runs ahead.

Nothing runs when it is queued. A queue runs in its own order; between queues only events order anything. Whatever no event forbids, some
policy does: so a missing wait becomes a wrong number on a machine where all would otherwise happen in the order it was written.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_Key = torch._C.DispatchKey
_ABOVE_THE_CPU = torch._C.DispatchKeySet(_Key.AutogradCPU)
for _key in (
    _Key.AutogradPrivateUse1,
    _Key.AutocastCPU,
    _Key.AutocastPrivateUse1,
    _Key.ADInplaceOrView,
    _Key.Python,
    _Key.PythonTLSSnapshot,
):
    _ABOVE_THE_CPU = _ABOVE_THE_CPU.add(_key)


class on_raw_memory:
    """Inside, torch calls go straight to the CPU kernels: no autograd, autocast, dispatch mode or function mode sees them."""

    def __enter__(self) -> None:
        self._keys, self._functions = torch._C._ExcludeDispatchKeyGuard(_ABOVE_THE_CPU), torch._C.DisableTorchFunction()
        self._keys.__enter__()
        self._functions.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._functions.__exit__(*exception)
        self._keys.__exit__(*exception)


class Event:
    """A point in one queue; `passed` once everything queued before it has run."""

    def __init__(self, queue: "Queue | None" = None) -> None:
        self.queue = queue
        self.passed = False

    def synchronize(self) -> None:
        """Makes the host wait: runs the queue up to this event, and whatever that needs of other queues."""
        if self.queue is None:
            raise RuntimeError("the event was never recorded, so waiting for it would never end")
        self.queue.scheduler.run_until(self)


class _Wait:
    def __init__(self, event: Event) -> None:
        self.event = event


class Queue:
    """One ordered queue of work of the device."""

    def __init__(self, name: str, scheduler: "Scheduler") -> None:
        self.name, self.scheduler = name, scheduler
        self.items: deque[Any] = deque()

    def add(self, work: Callable[[], Any]) -> None:
        self.scheduler.add(self, work)

    def add_quietly(self, work: Callable[[], Any]) -> None:
        """Queues without running anything, so that it may be called from a destructor at any moment."""
        self.items.append(work)

    def record(self) -> Event:
        event = Event(self)
        self.scheduler.add(self, event)
        return event

    def wait(self, event: Event) -> None:
        if event.queue is None:
            raise RuntimeError(f"the {self.name} lane was asked to wait for an event that was never recorded")
        self.scheduler.add(self, _Wait(event))

    def flush(self) -> None:
        """Runs everything queued so far."""
        if self.items:
            self.record().synchronize()

    @property
    def ready(self) -> bool:
        """Whether the next item may run now."""
        if not self.items:
            return False
        head = self.items[0]
        return not isinstance(head, _Wait) or head.event.passed


class Scheduler:
    """Runs queues under a policy.

    Policies: `"lazy"` runs only what the host waits for; `"eager:weights"` (or `gradients`, `compute`, several with commas) also runs those
    queues the moment nothing forbids it; `"random:7"` runs random stretches of random queues, the same ones for the same seed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: list[Queue] = []
        self.set_policy("lazy")

    def set_policy(self, policy: str) -> None:
        kind, _, detail = policy.partition(":")
        if kind not in ("lazy", "eager", "random"):
            raise ValueError(f"no scheduling policy {policy!r}; use 'lazy', 'eager:weights,gradients' or 'random:7'")
        self.policy = policy
        self._eager = tuple(detail.split(",")) if kind == "eager" else ()
        self._random = random.Random(int(detail)) if kind == "random" else None

    def new_queue(self, name: str) -> Queue:
        queue = Queue(name, self)
        self.queues.append(queue)
        return queue

    def add(self, queue: Queue, item: Any) -> None:
        with self.lock:
            queue.items.append(item)
            if self.policy != "lazy":
                with on_raw_memory():
                    self._run_by_policy()

    def run_until(self, target: Event) -> None:
        """Runs `target`'s queue up to it, first running other queues up to the events it waits for."""
        with self.lock, on_raw_memory():
            targets = [target]
            while targets:
                event = targets[-1]
                if event.passed:
                    targets.pop()
                    continue
                queue = event.queue
                if not queue.items:
                    raise RuntimeError(f"deadlock: an event of the {queue.name} lane is waited for and can no longer come")
                if queue.ready:
                    self._step(queue)
                    self._run_by_policy()
                elif queue.items[0].event in targets:
                    raise RuntimeError(f"deadlock: the {queue.name} lane waits for an event that waits for it")
                else:
                    targets.append(queue.items[0].event)

    def run_all(self) -> None:
        for queue in list(self.queues):
            queue.flush()

    def forget(self) -> None:
        """Drops all pending work, as after an exception."""
        with self.lock:
            for queue in self.queues:
                queue.items.clear()

    def _step(self, queue: Queue) -> None:
        item = queue.items.popleft()
        if isinstance(item, Event):
            item.passed = True
        elif not isinstance(item, _Wait):
            item()

    def _run_by_policy(self) -> None:
        if self._random is not None:
            self._run_at_random(self._random)
        moved = bool(self._eager)
        while moved:
            moved = False
            for queue in self.queues:
                while queue.name in self._eager and queue.ready:
                    self._step(queue)
                    moved = True

    def _run_at_random(self, rng: random.Random) -> None:
        if rng.random() < 0.4:
            queue = rng.choice(self.queues)
            for _ in range(rng.randrange(1, 12)):
                if queue.ready:
                    self._step(queue)
