"""Launch policy of the attention family: pure functions of shapes and element sizes."""

from __future__ import annotations

import torch

from ..cuda_launch import Geometry
from ..policy import WARP, Choice, ceil_div, first

APPEND_WARPS = 8  # rows of a token that share a block
# Elements of a row that a Triton program takes at once, and its warps; the last is the longest row that it can take.
APPEND_TILES = ((128, 1), (1024, 4))


def append(tokens: int, rows: int) -> Geometry:
    """append_kv: a warp for each row, a head's key or value, of a token.

    Args:
        tokens: how many.
        rows: of each token.
    """
    together = min(APPEND_WARPS, rows)
    return Geometry(grid=(tokens, ceil_div(rows, together), 1), block=(WARP, together, 1))


def triton_append(dim: int) -> Choice[tuple[int, int]]:
    """append_kv in Triton: a program for each row, (elements, warps).

    Raises:
        ValueError: a row is longer than the longest tile.
    """
    return first(APPEND_TILES, lambda tile: "" if dim <= tile[0] else f"{dim} elements do not fit into {tile[0]}")


def scale_strides(scale: torch.Tensor) -> tuple[int, int, int]:
    """Of a scale by page, slot and head: one for everyone, one a head, or one for each."""
    if scale.dim() == 3:
        page, slot, head = scale.stride()
        return page, slot, head
    return 0, 0, scale.stride(0) if scale.numel() > 1 else 0
