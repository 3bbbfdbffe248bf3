"""Ranges that profilers find a row by, and the commands that reproduce one row under a profiler."""

from __future__ import annotations

import importlib.util
import shlex
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

CALLS = 20  # of the row, under a profiler


def annotation(row: str, variant: str, device: torch.device) -> AbstractContextManager[Any]:
    """An NVTX range "row/variant" on a GPU where the package nvtx is installed; otherwise nothing."""
    if device.type != "cuda" or importlib.util.find_spec("nvtx") is None:
        return nullcontext()
    import nvtx

    return nvtx.annotate(range_name(row, variant), domain=None)


def range_name(row: str, variant: str) -> str:
    """The range's name: with ":" for the characters that Nsight Compute's filters take for syntax."""
    return f"{row}:{variant}".translate(str.maketrans("[],/@ ", ":::::-")).replace("::", ":")


def commands(bench: str, row: str, backend: str, device: torch.device) -> str:
    """What to type to see one row in a profiler.

    Args:
        bench: the benchmark's name, as in `python -m bench.NAME`.
        row: a case's `row`.
        backend: the variant.
        device: where it runs.
    """
    run = f"python -m bench.{bench} --row {shlex.quote(row)} --backend {backend} --calls {CALLS}"
    name = shlex.quote(range_name(row, backend))
    if device.type == "cuda":
        register = "--env-var NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
        return (
            "# Nsight Compute: every kernel of the row, with all sections\n"
            f"ncu --nvtx --nvtx-include {name}/ --set full --import-source yes -o {bench}-{backend} {run}\n"
            "# Nsight Systems: the time line of the row alone\n"
            f"nsys profile --trace=cuda,nvtx,osrt --capture-range=nvtx --nvtx-capture={name} {register} "
            f"-o {bench}-{backend} {run}\n"
        )
    events = "cycles,instructions,branch-misses,cache-misses,LLC-loads,LLC-load-misses,dTLB-load-misses"
    return (
        "# perf: counters of the run\n"
        f"perf stat -e {events} {run}\n"
        "# perf: where the time goes\n"
        f"perf record --call-graph dwarf -o {bench}-{backend}.perf {run}\n"
        f"perf report -i {bench}-{backend}.perf\n"
    )
