"""What the families' launch policies share: candidates, the reason for every rejected one, and the block shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

WARP = 32
MAX_BLOCK = 1024


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The candidate that was taken, and for each candidate tried before it the reason why not."""

    taken: T
    rejected: tuple[tuple[T, str], ...]


def first(candidates: Iterable[T], objection: Callable[[T], str]) -> Choice[T]:
    """The first candidate to which `objection` has nothing ("") to say.

    Raises:
        ValueError: every candidate is rejected; the text holds each reason.
    """
    rejected: list[tuple[T, str]] = []
    for candidate in candidates:
        reason = objection(candidate)
        if not reason:
            return Choice(candidate, tuple(rejected))
        rejected.append((candidate, reason))
    raise ValueError("no candidate is possible: " + "; ".join(f"{c}: {reason}" for c, reason in rejected))


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n below 1."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, of non-negative integers."""
    return -(-a // b)
