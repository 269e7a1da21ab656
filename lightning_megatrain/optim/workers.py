"""Threads that help the caller's with a step."""

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread


class Workers:
    """As many threads as any step has asked for, which wait for jobs.

    Made so that Ctrl-C can do no harm at any moment (it could leave a ThreadPoolExecutor with a thread that it does not know, for which
    the interpreter then waits at its end): the threads are daemons, and one that was begun and not counted is one more.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._count = 0

    def hand_out(self, job: Callable[[], object], times: int) -> None:
        """Have a job done by so many threads, at once or when they are free; by fewer if the system has no more."""
        with suppress(RuntimeError):  # no more threads, or the interpreter ends
            while self._count < times:
                Thread(target=self._work, name=f"host-adamw-{self._count}", daemon=True).start()
                self._count += 1
        for _ in range(min(times, self._count)):
            self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
