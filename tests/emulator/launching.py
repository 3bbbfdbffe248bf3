"""How the emulator's tests launch a self-test kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[2]
SELFTEST = sorted((ROOT / "csrc" / "cuda" / "selftest").glob("*.cu"))
BROKEN = sorted((ROOT / "tests" / "emulator" / "kernels").glob("*.cu"))


class Params(ctypes.Structure):
    """csrc/cuda/selftest/params.cuh, field by field."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("arg", ctypes.c_int32),
        ("width", ctypes.c_int32),
    ]


def run(
    module: ModuleType,
    name: str,
    out: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    grid: tuple[int, int, int] | int = 1,
    block: tuple[int, int, int] | int = 32,
    shared: int = 0,
    n: int = 0,
    op: int = 0,
    arg: int = 0,
    width: int = 32,
    cooperative: bool = False,
) -> torch.Tensor:
    """Launches `name` and returns `out`."""
    address = [0 if t is None else t.data_ptr() for t in (a, b, out)]
    params = Params(*address, n, op, arg, width)
    dims = [(d, 1, 1) if isinstance(d, int) else d for d in (grid, block)]
    module.launch(name, *dims, shared, 0, bytes(params), cooperative=cooperative)
    return out


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random 32-bit words, the extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    flat = values.view(-1)
    edges = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    flat[: min(5, flat.numel())] = edges[: flat.numel()]
    return values
