"""The estimators and clocks of the benchmarks, on a clock that only the measured work advances."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest
import torch

from bench.harness.cases import SelfTimed, Settings
from bench.harness.estimators import geometric_mean, median, median_interval, quantile, relative_iqr
from bench.harness.timing import HostClock, Plan, calibrate, interleave, orders
from tests.simulated import PLAN, Simulated

HOST = Settings(torch.device("cpu"))


# --- estimators ---


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (21, 6), (101, 41)])
def test_interval_of_the_median_has_the_ranks_of_tables(n, rank):
    """Ranks as printed in tables of the sign test's interval at 95 % (n = 9: 2 and 8; n = 21: 6 and 16)."""
    samples = random.Random(n).sample(range(1, n + 1), n)
    assert median_interval(samples) == (rank, n + 1 - rank)


@pytest.mark.parametrize("n", [7, 21, 51])
def test_interval_covers_the_median_of_skewed_and_contaminated_times(n):
    draw, trials, hits = random.Random(n), 2000, 0
    for _ in range(trials):
        # A hard lower end, a long tail, and now and then a preemption.
        samples = [1 + draw.lognormvariate(0, 1) + (20 if draw.random() < 0.1 else 0) for _ in range(n)]
        low, high = median_interval(samples)
        hits += low <= _contaminated_median() <= high
    k = sorted(range(1, n + 1)).index(median_interval(list(range(1, n + 1)))[0]) + 1
    exact = 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
    assert exact >= 0.95
    assert abs(hits / trials - exact) < 4 * math.sqrt(exact * (1 - exact) / trials) + 1e-3


def _contaminated_median() -> float:
    """Where 0.9 F(x - 1) + 0.1 F(x - 21) is one half, F the standard log-normal distribution function."""

    def below(x: float) -> float:
        def lognormal(y: float) -> float:
            return 0.5 * math.erfc(-math.log(y) / math.sqrt(2)) if y > 0 else 0.0

        return 0.9 * lognormal(x - 1) + 0.1 * lognormal(x - 21)

    low, high = 1.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.5 else (low, middle)
    return low


def test_interval_of_very_many_samples_does_not_overflow():
    low, high = median_interval([float(i) for i in range(5000)])
    assert 2499 - 80 < low < 2499 < 2500 < high < 2500 + 80


def test_medians_quantiles_and_noise():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert quantile([0, 10], 0.25) == 2.5
    assert relative_iqr([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert geometric_mean([4, 0.25]) == pytest.approx(1)
    with pytest.raises(ValueError, match="no samples"):
        median([])
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


# --- timing ---


def test_work_that_times_itself_has_rounds_of_its_own_number():
    world = Simulated()
    plan = Plan(0.0, 0.01, 0.0, min_rounds=7, min_runs=2)
    runs = iter([5.0, 6.0])
    samples = interleave({"told": SelfTimed(lambda: next(runs)), "work": [world.work(0.02)]}, world.clock(), plan)
    assert samples["told"] == [5.0, 6.0]
    assert len(samples["work"]) == 2


def test_known_costs_are_found_exactly():
    world = Simulated()
    works = {"fast": [world.work(1e-6)], "slow": [world.work(0.5)], "told": SelfTimed(lambda: 7.0)}
    samples = interleave(works, world.clock(), PLAN)
    assert {name: round(median(times), 12) for name, times in samples.items()} == {
        "fast": 1e-6,
        "slow": 0.5,
        "told": 7.0,
    }


def test_calibration_fills_a_turn_and_repeats_long_work_once():
    world = Simulated()
    clock = world.clock()
    repeats = calibrate(clock.timer([world.work(1e-5)]), PLAN)
    assert PLAN.slice_seconds <= repeats * 1e-5 <= 3 * PLAN.slice_seconds
    assert calibrate(clock.timer([world.work(1.0)]), PLAN) == 1


def test_settling_runs_for_as_long_as_it_should_before_anything_counts():
    world = Simulated()
    calibrate(world.clock().timer([world.work(0.02)]), Plan(slice_seconds=0.01, settle_seconds=0.5))
    assert 0.5 <= world.time < 0.6


def test_every_round_has_every_variant_once_in_an_order_drawn_from_the_seed():
    def turns(seed: int) -> list[str]:
        world, log = Simulated(), []
        works = {name: [world.work(0.02)] for name in "abcd"}

        def annotate(name: str) -> Any:
            log.append(name)
            return _Nothing()

        interleave(works, world.clock(), Plan(0.0, 0.01, 0.0, min_rounds=24, seed=seed), annotate)
        return log

    log = turns(0)
    rounds = ["".join(log[i : i + 4]) for i in range(0, len(log), 4)]
    assert len(rounds) == 24
    assert all(sorted(round_) == list("abcd") for round_ in rounds)
    assert len(set(rounds)) > 8
    assert {round_[0] for round_ in rounds} == set("abcd")
    assert turns(0) == log
    assert turns(1) != log
    assert next(orders(["a", "b", "c"], 5)) == next(orders(["a", "b", "c"], 5))


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *details: object) -> None: ...


def test_a_drifting_machine_does_not_favour_whoever_is_measured_first():
    world = Simulated()

    def speed() -> float:  # three times slower at the end than at the beginning
        return 1 + world.time / 2

    works = {"one": [world.work(lambda: 0.01 * speed())], "two": [world.work(lambda: 0.02 * speed())]}
    samples = interleave(works, world.clock(), Plan(0.0, 0.01, 0.0, min_rounds=51))
    assert world.time > 3
    assert median(samples["two"]) / median(samples["one"]) == pytest.approx(2, rel=0.05)


def test_the_call_that_wakes_threads_after_another_variant_is_not_timed():
    world, last = Simulated(), [""]

    def cost(name: str) -> float:
        woken, last[0] = last[0] != name, name
        return 0.02 + 5.0 * woken

    works = {name: [world.work(lambda name=name: cost(name))] for name in "ab"}
    samples = interleave(works, world.clock(), PLAN)
    assert max(samples["a"] + samples["b"]) == pytest.approx(0.02)


def test_cold_work_goes_round_its_buffers_without_starting_again():
    world = Simulated()
    works = {"cold": [world.work(0.004, str(i)) for i in range(5)], "other": [world.work(0.01, "other")]}
    interleave(works, world.clock(), PLAN)
    visited = [int(name) for name in world.log if name != "other"]
    assert visited == [i % 5 for i in range(len(visited))]
    assert HOST.copies(100) == 1
    assert (
        Settings(torch.device("cpu"), cold_bytes=1000).copies(300) == 5
    )  # 4 more fill 1000 bytes beside the one in use


def test_the_wall_clock_counts_at_least_what_a_busy_loop_burns():
    def spin() -> None:
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            pass

    samples = interleave({"spin": [spin]}, HostClock(rest_seconds=0.0), Plan(0.0, 4e-3, 0.0, min_rounds=3))
    assert len(samples["spin"]) == 3
    assert min(samples["spin"]) >= 2e-3
