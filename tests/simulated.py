"""A machine whose clock only work advances, so that what a benchmark should measure is known exactly."""

from __future__ import annotations

from collections.abc import Callable

from bench.harness.timing import HostClock, Plan


class Simulated:
    """A clock that only work advances: `work(seconds)` is a call that takes so long."""

    def __init__(self) -> None:
        self.time = 0.0
        self.log: list[str] = []

    def now(self) -> float:
        return self.time

    def clock(self) -> HostClock:
        return HostClock(now=self.now, rest_seconds=0.0)

    def work(self, seconds: float | Callable[[], float], name: str = "") -> Callable[[], None]:
        def call() -> None:
            self.time += seconds() if callable(seconds) else seconds
            self.log.append(name)

        return call


PLAN = Plan(seconds=10.0, slice_seconds=0.01, settle_seconds=0.0, min_rounds=7, max_rounds=21)
