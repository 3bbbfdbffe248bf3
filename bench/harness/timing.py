"""Times work: variants take turns in one process, in an order that is drawn anew in every round.

What disturbs a measurement on a shared machine comes in stretches longer than a round, so it meets all variants alike;
and no variant always runs behind the same other one. Before its turn a variant gets a rest, in which the threads of the
one before it stop spinning for work, and a call that isn't timed, which wakes its own.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.harness.cases import SelfTimed, Work


class Clock(Protocol):
    """How long repeated work takes."""

    def timer(self, work: Work) -> Callable[[int], float]:
        """A function that does the work so many times and returns the seconds of one."""

    def rest(self) -> None:
        """Lets what ran before come to rest."""


class HostClock:
    """Time of a clock of the host, for work that has been done when its call returns.

    Args:
        now: seconds; the wall's by default.
        rest_seconds: longer than idle threads spin: libgomp's, which PyTorch uses, were measured to spin 4 to 5 ms.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, rest_seconds: float = 0.008) -> None:
        self._now, self._rest = now, rest_seconds

    def timer(self, work: Work) -> Callable[[int], float]:
        if isinstance(work, SelfTimed):
            run = work.run
            return lambda repeats: sum(run() for _ in range(repeats)) / repeats
        calls, now = itertools.cycle(work), self._now

        def seconds(repeats: int) -> float:
            chosen = list(itertools.islice(calls, repeats))
            start = now()
            for call in chosen:
                call()
            return (now() - start) / repeats

        return seconds

    def rest(self) -> None:
        time.sleep(self._rest)


class CudaClock:
    """Time of a GPU, by events around the work.

    The repeats are captured once as a graph, so that launching from Python costs nothing; what can't be captured is
    launched as it is, and its time then includes gaps between kernels.
    """

    MAX_CAPTURED = 2000  # launches in one graph

    def timer(self, work: Work) -> Callable[[int], float]:
        if isinstance(work, SelfTimed):
            return HostClock().timer(work)
        graphs: dict[int, Any] = {}

        def launch(repeats: int) -> None:
            for call in itertools.islice(itertools.cycle(work), repeats):
                call()

        def seconds(repeats: int) -> float:
            if repeats not in graphs:
                graphs[repeats] = _captured(launch, repeats) if repeats <= self.MAX_CAPTURED else None
            graph = graphs[repeats]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            if graph is None:
                launch(repeats)
            else:
                graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / repeats

        return seconds

    def rest(self) -> None:
        torch.cuda.synchronize()


def _captured(launch: Callable[[int], None], repeats: int) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(min(repeats, 3))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch(repeats)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def clock_for(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        seconds: for all rounds of all variants of a case.
        slice_seconds: that a variant's turn should take at least.
        settle_seconds: of untimed work before, in which clocks and caches settle.
        min_rounds: at least, whatever they take.
        min_runs: likewise where a variant times itself, whose rounds are whole runs of an engine.
        max_rounds: at most.
        seed: of the order of turns.
    """

    seconds: float = 2.0
    slice_seconds: float = 0.02
    settle_seconds: float = 0.1
    min_rounds: int = 7
    min_runs: int = 3
    max_rounds: int = 101
    seed: int = 0


Annotate = Callable[[str], AbstractContextManager[Any]]


def calibrate(timer: Callable[[int], float], plan: Plan) -> int:
    """Repeats that fill a turn, found by doubling; these first ones also settle clocks and caches."""
    repeats, spent = 1, 0.0
    while True:
        took = timer(repeats) * repeats
        spent += took
        if took >= plan.slice_seconds and spent >= plan.settle_seconds:
            return repeats
        if took >= plan.slice_seconds:
            continue  # long enough, but not settled
        wanted = repeats * plan.slice_seconds / took if took > 0 else 2 * repeats
        repeats = min(2 * repeats, max(repeats + 1, round(1.1 * wanted)))


def orders(names: list[str], seed: int) -> Iterator[list[str]]:
    """Orders of turns without end, each drawn at random."""
    draw = random.Random(seed)
    while True:
        yield draw.sample(names, len(names))


def interleave(
    works: Mapping[str, Work], clock: Clock, plan: Plan, annotate: Annotate = lambda name: nullcontext()
) -> dict[str, list[float]]:
    """Seconds of one call of each variant, a sample a round.

    Args:
        works: at least one.
        clock: what times them.
        plan: how long.
        annotate: makes the range around a turn, by the variant's name.

    Returns:
        As many samples for each variant, in the order of the rounds.
    """
    timers = {name: clock.timer(work) for name, work in works.items()}
    long = any(isinstance(work, SelfTimed) for work in works.values())  # whole runs of an engine
    min_rounds = plan.min_runs if long else plan.min_rounds
    repeats: dict[str, int] = {}
    for name, timer in timers.items():
        clock.rest()
        repeats[name] = 1 if isinstance(works[name], SelfTimed) else calibrate(timer, plan)
    samples: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for order in orders(list(works), plan.seed):
        for name in order:
            clock.rest()
            if not isinstance(works[name], SelfTimed):
                timers[name](1)
            with annotate(name):
                samples[name].append(timers[name](repeats[name]))
        rounds = len(samples[order[0]])
        turn = (time.perf_counter() - began) / rounds
        if rounds >= plan.max_rounds or (rounds >= min_rounds and (rounds + 1) * turn > plan.seconds):
            return samples
    raise AssertionError("orders never end")
