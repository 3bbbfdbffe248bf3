"""Tensors with any leading dimensions as matrices, which is how the native kernels see them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def _row_count(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])  # reshape cannot infer it for a tensor without elements


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [R, D]: a view where the leading dimensions merge into one stride, else a copy."""
    return x if x.dim() == 2 else x.reshape(_row_count(x), x.shape[-1])


def write_rows(out: torch.Tensor, write: Callable[[torch.Tensor], None]) -> None:
    """Calls `write` with `out` as a matrix; through a temporary where its leading dimensions do not merge."""
    if out.dim() == 2:
        write(out)
        return
    rows = out.reshape(_row_count(out), out.shape[-1])
    write(rows)
    if rows.data_ptr() != out.data_ptr():
        out.copy_(rows.view(out.shape))
