"""Page locking of host memory, emulated: keeps the books and can run out."""


class PageLocks:
    """What `cudaHostRegister` and `cudaHostUnregister` would do.

    Args:
        limit: the most bytes that can be locked at once; `None` for any amount.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}  # bytes by address

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())

    def lock(self, pointer: int, nbytes: int) -> bool:
        """Locks a range and returns True, or returns False where the limit is reached or the range overlaps a locked one."""
        overlaps = any(start < pointer + nbytes and pointer < start + length for start, length in self.locked.items())
        if overlaps or (self.limit is not None and self.locked_bytes + nbytes > self.limit):
            return False
        self.locked[pointer] = nbytes
        return True

    def unlock(self, pointer: int) -> None:
        """Unlocks a range that `lock` locked; any other address is an error."""
        del self.locked[pointer]
