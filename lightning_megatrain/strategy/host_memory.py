"""How much host memory a process may still take."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be taken without swapping: what the system says is free for use, or less where a container's limit is nearer."""
    return min(_of_the_system(), *_of_containers())


def _of_the_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_containers() -> list[int]:
    """What the limits of control groups, version 2 and 1, leave."""
    files = [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
    left = [1 << 62]
    for limit, used in files:
        try:
            left.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return left
