"""How much memory this process may still use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = (  # limit and use, version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, as far as the system tells; None where it does not.

    The smaller of what the machine has free (page cache included) and what the container's limit leaves.
    """
    found = [value for value in (_machine(), _container()) if value is not None]
    return min(found, default=None)


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _container() -> int | None:
    for limit, use in _CGROUPS:
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(use).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return None
