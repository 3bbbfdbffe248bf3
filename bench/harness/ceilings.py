"""What this machine can do at most, measured in the run whose results are held against it.

Each ceiling is tried in several forms (loops of our own from peaks.cpp, PyTorch, the C library) and the best one
counts, so that a kernel is not praised for beating a slow loop. Like everything else, the forms take turns and their
medians are compared.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.cases import ROOFS, Work
from bench.harness.estimators import median
from bench.harness.machine import cpu_caches, last_level_bytes
from bench.harness.timing import Plan, clock_for, interleave

SOURCE = Path(__file__).with_name("peaks.cpp")
_PLAN = {True: Plan(0.3, 0.01, 0.02, 3, 15), False: Plan(1.0, 0.02, 0.1, 5, 31)}


@dataclass(frozen=True)
class Ceiling:
    """One of `ROOFS`.

    Args:
        value: bytes or flops a second.
        form: which form reached it.
        forms: what each form reached.
    """

    value: float
    form: str
    forms: dict[str, float]


Ceilings = dict[str, Ceiling]


def as_json(ceilings: Ceilings) -> dict[str, Any]:
    """As the results keep them: GB/s (1e9 bytes) and TFLOP/s, each with the form that reached it."""
    result = {}
    for name, ceiling in ceilings.items():
        unit, scale = ("GB/s", 1e9) if ROOFS[name] == "memory" else ("TFLOP/s", 1e12)
        forms = {form: round(value / scale, 4) for form, value in ceiling.forms.items()}
        result[name] = {"value": round(ceiling.value / scale, 4), "unit": unit, "form": ceiling.form, "forms": forms}
    return result


def peaks_library() -> ctypes.CDLL | None:
    """peaks.cpp, compiled for this machine; None without a compiler."""
    from bindings.compile import BuildError, cxx
    from kernels.jit import cache_folder

    try:
        compiler = cxx()
    except BuildError:
        return None
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    identity = [
        *compiler,
        *flags,
        SOURCE.read_text(),
        Path("/proc/cpuinfo").read_text().split("\n\n")[0].partition("flags")[2],
    ]
    folder = cache_folder().parent / "peaks"
    path = folder / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*compiler, *flags, str(SOURCE), "-o", str(partial)], capture_output=True, text=True)
        if done.returncode != 0:
            return None
        os.replace(partial, path)
    library = ctypes.CDLL(str(path))
    for name, arguments in (("tw_read", 2), ("tw_fp32", 1), ("tw_bf16", 1)):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64][-arguments:]
    return library


def huge_buffer(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], written once, in huge pages where the system gives them: translation then costs next to nothing,
    which is the most that a kernel could have.
    """
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def _best(forms: dict[str, tuple[Work, float]], device: torch.device, plan: Plan) -> Ceiling:
    samples = interleave({name: work for name, (work, _) in forms.items()}, clock_for(device), plan)
    rates = {name: amount / median(samples[name]) for name, (_, amount) in forms.items()}
    form = max(rates, key=lambda name: rates[name])
    return Ceiling(rates[form], form, rates)


class _Team:
    """Runs one function in as many threads at once, and hands back when all are done."""

    def __init__(self, threads: int) -> None:
        self.threads, self._pool = threads, ThreadPoolExecutor(max(1, threads - 1))

    def run(self, function: Callable[[int], object]) -> None:
        others = [self._pool.submit(function, i) for i in range(1, self.threads)]
        function(0)
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()


def _parts(buffer: torch.Tensor, threads: int) -> tuple[list[int], int]:
    size = buffer.numel() // threads // 4096 * 4096
    return [buffer.data_ptr() + i * size for i in range(threads)], size


def _reading(buffer: torch.Tensor, library: ctypes.CDLL | None, team: _Team) -> dict[str, tuple[Work, float]]:
    numbers = buffer.view(torch.float32)
    columns = 4096
    matrix, vector = numbers[: numbers.numel() // columns * columns].view(-1, columns), torch.ones(columns)
    forms: dict[str, tuple[Work, float]] = {
        "torch.sum": ([lambda: numbers.sum()], 4 * numbers.numel()),
        "torch.mv": ([lambda: torch.mv(matrix, vector)], 4 * matrix.numel()),
    }
    if library is not None:
        places, size = _parts(buffer, team.threads)
        read = library.tw_read
        forms["loop"] = ([lambda: team.run(lambda i: read(places[i], size))], size * team.threads)
    return forms


def _copying(source: torch.Tensor, target: torch.Tensor, team: _Team) -> dict[str, tuple[Work, float]]:
    sources, size = _parts(source, team.threads)
    targets, _ = _parts(target, team.threads)
    a, b = source.view(torch.float32), target.view(torch.float32)
    return {
        "torch.copy_": ([lambda: b.copy_(a)], 2 * source.numel()),
        "memcpy": ([lambda: team.run(lambda i: ctypes.memmove(targets[i], sources[i], size))], 2 * size * team.threads),
    }


def _matmul(dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]], device: torch.device) -> dict[str, Any]:
    forms = {}
    for m, n, k in sizes:
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
        out = torch.empty(m, n, dtype=dtype, device=device)
        forms[f"torch.mm {m}x{n}x{k}"] = ([lambda a=a, b=b, out=out: torch.mm(a, b.T, out=out)], 2.0 * m * n * k)
    return forms


def _computing(function: Any, rounds: int, team: _Team) -> tuple[Work, float] | None:
    amount = function(rounds) * team.threads
    return ([lambda: team.run(lambda i: function(rounds))], amount) if amount else None


def measure_cpu(threads: int, quick: bool) -> Ceilings:
    """The ceilings of this machine's CPU with so many threads."""
    device, plan = torch.device("cpu"), _PLAN[quick]
    library, team = peaks_library(), _Team(threads)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    # A shared cache may keep much of a set that is not several times its size.
    times = 3 if quick else 5
    large = min(max(256 << 20, times * last_level_bytes(device)), available // 4) >> 22 << 22
    small = threads * (cpu_caches().get("l2", 1 << 20) // 2) >> 14 << 14
    result: Ceilings = {}
    for prefix, size in (("", large), ("cache_", small)):
        source, target = huge_buffer(size), huge_buffer(size // 2 if prefix else size)
        result[f"{prefix}read"] = _best(_reading(source, library, team), device, plan)
        result[f"{prefix}copy"] = _best(_copying(source[: target.numel()], target, team), device, plan)
    shapes = [(1024, 1024, 1024), (2048, 1536, 576)] + ([] if quick else [(2048, 2048, 2048)])
    for name, dtype, rounds in (("fp32", torch.float32, 1 << 20), ("bf16", torch.bfloat16, 1 << 17)):
        forms = _matmul(dtype, shapes, device)
        loop = None if library is None else _computing(getattr(library, f"tw_{name}"), rounds, team)
        result[name] = _best({**forms, **({"loop": loop} if loop else {})}, device, plan)
    team.close()
    return result


def measure_cuda(device: torch.device, quick: bool) -> Ceilings:
    """The ceilings of a GPU: copies and sums of a GiB, square matrix products."""
    plan = _PLAN[quick]
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    numbers = source.view(torch.float32)
    amount = float(source.numel())
    result = {
        "copy": _best({"torch.copy_": ([lambda: target.copy_(source)], 2 * amount)}, device, plan),
        "read": _best({"torch.sum": ([lambda: numbers.sum()], amount)}, device, plan),
    }
    # A read can't be slower than the reading half of a copy; sums of some sizes are.
    if result["copy"].value > result["read"].value:
        best = result["copy"]
        result["read"] = Ceiling(best.value, best.form, {**result["read"].forms, **best.forms})
    small = torch.ones(last_level_bytes(device) // 4, dtype=torch.uint8, device=device)
    copied = torch.empty_like(small)
    result["cache_copy"] = _best({"torch.copy_": ([lambda: copied.copy_(small)], 2.0 * small.numel())}, device, plan)
    result["cache_read"] = result["cache_copy"]
    sizes = [(n, n, n) for n in ((8192,) if quick else (4096, 8192, 16384))]
    result["fp32"] = _best(_matmul(torch.float32, sizes[:1], device), device, plan)
    result["bf16"] = _best(_matmul(torch.bfloat16, sizes, device), device, plan)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        result["fp8"] = _best(_scaled_mm(sizes, device), device, plan)
    return result


def _scaled_mm(sizes: Sequence[tuple[int, int, int]], device: torch.device) -> dict[str, tuple[Work, float]]:
    one = torch.ones((), device=device)
    forms: dict[str, tuple[Work, float]] = {}
    for m, n, k in sizes:
        a, b = (torch.ones(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
        call = lambda a=a, b=b: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)  # noqa: E731
        forms[f"torch._scaled_mm {m}x{n}x{k}"] = ([call], 2.0 * m * n * k)
    return forms


def measure(device: torch.device, threads: int, quick: bool) -> Ceilings:
    """Every ceiling of the device that cases can be held against."""
    return measure_cuda(device, quick) if device.type == "cuda" else measure_cpu(threads, quick)
