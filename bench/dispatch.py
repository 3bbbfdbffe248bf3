"""What a call through the dispatch table costs above the native function that it ends in.

    python -m bench.dispatch [--quick] [--json PATH]

Each operation is called on one row, where there is next to nothing to compute, with its outputs given; beside it the
native function with the same addresses. The two alternate, and the time is the calling thread's own, so that what else
runs on the machine counts as little as it can.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import kernels
from kernels import _cpu
from kernels.dtypes import CODES

Call = Callable[[], object]


def _norm(width: int) -> tuple[Call, Call]:
    x, weight = torch.randn(1, width), torch.randn(width)
    out = torch.empty_like(x)
    code = CODES[x.dtype]
    native = (1, width, x.data_ptr(), width, weight.data_ptr(), 1e-6, 0.0, out.data_ptr(), width, code, code)
    return lambda: kernels.rms_norm(x, weight, out=out), lambda: _cpu.rms_norm(*native)


def _silu(width: int) -> tuple[Call, Call]:
    x, out = torch.randn(1, 2 * width), torch.empty(1, width)
    native = (1, width, x.data_ptr(), 2 * width, out.data_ptr(), width, 0, CODES[x.dtype])
    return lambda: kernels.silu_and_mul(x, out=out), lambda: _cpu.gated_activation(*native)


CASES: dict[str, Callable[[int], tuple[Call, Call]]] = {"rms_norm": _norm, "silu_and_mul": _silu}


def _seconds(call: Call, repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - start) / repeats


def measure(rounds: int, repeats: int = 1000, width: int = 64) -> list[dict[str, object]]:
    """A row an operation: median seconds of the call, of the native function, and of their differences."""
    rows: list[dict[str, object]] = []
    for name, case in CASES.items():
        pair = case(width)
        for call in pair:
            _seconds(call, repeats)
        times = [tuple(_seconds(call, repeats) for call in pair) for _ in range(rounds)]
        above = sorted(call - native for call, native in times)
        rows.append(
            {
                "bench": "dispatch",
                "op": name,
                "case": {"rows": 1, "width": width},
                "variant": "cpu",
                "seconds": statistics.median(call for call, _ in times),
                "native_seconds": statistics.median(native for _, native in times),
                "overhead_seconds": statistics.median(above),
                "overhead_ci": [above[len(above) // 4], above[-1 - len(above) // 4]],
            }
        )
    return rows


def pool_seconds(rounds: int, repeats: int = 1000) -> float:
    """Median seconds of a parallel loop over all threads whose body does nothing, by the wall clock."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        _cpu.empty_parallel_for(64, repeats)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", metavar="PATH", help="also write the rows to a file")
    options = parser.parse_args(arguments)
    rows = measure(9 if options.quick else 51)
    print(f"{'operation':16}{'call':>10}{'native':>10}{'above it':>10}   quartiles")
    for row in rows:
        figures = (1e6 * float(str(row[key])) for key in ("seconds", "native_seconds", "overhead_seconds"))
        low, high = (1e6 * bound for bound in row["overhead_ci"])  # type: ignore[attr-defined]
        print(f"{row['op']:16}" + "".join(f"{us:8.2f}us" for us in figures) + f"   [{low:.2f}, {high:.2f}] us")
    print(f"empty parallel loop over {_cpu.num_threads()} threads: {1e6 * pool_seconds(9):.2f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
