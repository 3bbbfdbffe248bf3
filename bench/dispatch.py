"""What a call costs above the native function that it ends in: python -m bench.dispatch --help.

Each operation is called on one row, where there is next to nothing to compute, with its outputs given; beside it, as
its peer, the native function with the same addresses. The time is the calling thread's own, so that what else runs on
the machine counts as little as it can.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import kernels
from bench.harness import cli, runner
from bench.harness.cases import Case, Settings, Work
from bench.harness.estimators import median, median_interval
from bench.harness.timing import HostClock
from kernels import _cpu
from kernels.dtypes import CODES

WIDTH = 64


def _norm() -> Case:
    def inputs() -> Any:
        x = torch.randn(1, WIDTH)
        return x, torch.randn(WIDTH), torch.empty_like(x)

    def ours(made: Any, backend: str) -> Work:
        x, weight, out = made
        return [lambda: kernels.rms_norm(x, weight, out=out)]

    def native(made: Any) -> Work:
        x, weight, out = made
        code = CODES[x.dtype]
        places = (1, WIDTH, x.data_ptr(), WIDTH, weight.data_ptr(), 1e-6, 0.0, out.data_ptr(), WIDTH, code, code)
        return [lambda: _cpu.rms_norm(*places)]

    return _case("rms_norm", 3 * WIDTH, 4 * WIDTH, inputs, ours, native)


def _silu() -> Case:
    def inputs() -> Any:
        return torch.randn(1, 2 * WIDTH), torch.empty(1, WIDTH)

    def ours(made: Any, backend: str) -> Work:
        x, out = made
        return [lambda: kernels.silu_and_mul(x, out=out)]

    def native(made: Any) -> Work:
        x, out = made
        places = (1, WIDTH, x.data_ptr(), 2 * WIDTH, out.data_ptr(), WIDTH, 0, CODES[x.dtype])
        return [lambda: _cpu.gated_activation(*places)]

    return _case("silu_and_mul", 3 * WIDTH, 5 * WIDTH, inputs, ours, native)


def _case(op: str, elements: int, flops: int, inputs: Any, ours: Any, native: Any) -> Case:
    shape = {"rows": 1, "width": WIDTH, "dtype": "fp32"}
    peers = {"native": native}
    return Case(op, shape, 4 * elements, flops, ("cache_copy",), inputs, ours, peers, quick=True, backends=("cpu",))


def cases(settings: Settings) -> list[Case]:
    """One operation with a weight, and one without."""
    return [_norm(), _silu()]


def show_differences(measurements: Sequence[runner.Measurement]) -> None:
    """Prints what a call takes above its native function: the median over the rounds, in each of which both ran."""
    for measurement in measurements:
        samples = measurement.samples
        if {"cpu", "native"} <= set(samples):
            above = [call - native for call, native in zip(samples["cpu"], samples["native"], strict=True)]
            low, high = (1e6 * bound for bound in median_interval(above))
            print(
                f"{measurement.case.op}: {1e6 * median(above):.2f} us above the native function [{low:.2f}, {high:.2f}]"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    clock = HostClock(now=time.thread_time)
    what = "The cost of a call through the dispatch table."
    return cli.main("dispatch", what, cases, arguments, clock, show_differences)


if __name__ == "__main__":
    sys.exit(main())
