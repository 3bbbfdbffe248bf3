"""What the CPU kernels run on: how many threads, and which level of the instruction set.

Two variables of the environment, read at the first operation, decide where nothing else is said:
TILEWRIGHT_NUM_THREADS, by default the cores that this process may use; and TILEWRIGHT_ISA, by default the highest level
that the machine has. Neither changes what is computed beyond what is said below, so they need not be set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _cpu

ISA_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


def num_threads() -> int:
    """Threads that an operation uses, the calling one included."""
    return _cpu.num_threads()


def set_num_threads(threads: int) -> None:
    """Sets how many threads the following operations use. Results do not depend on it, bit for bit.

    Raises:
        ValueError: `threads` is not in 1 .. 1024.
    """
    _cpu.set_num_threads(threads)


def isa() -> str:
    """The level in use, one of `ISA_LEVELS`."""
    return _cpu.isa()


def detected_isa() -> str:
    """The highest level that this machine and its operating system have."""
    return _cpu.detected_isa()


@contextmanager
def force_isa(level: str) -> Iterator[None]:
    """Uses `level` inside the block, in every thread of the process; for tests and comparisons.

    Levels may differ in the last bits, because fused products round once and others twice.

    Raises:
        ValueError: there is no such level, or it is higher than the detected one.
    """
    before = _cpu.isa()
    _cpu.set_isa(level)
    try:
        yield
    finally:
        _cpu.set_isa(before)
