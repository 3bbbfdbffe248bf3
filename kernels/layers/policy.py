"""Launch policy of the layers: pure functions of shapes, element sizes and alignment.

Nothing here depends on the number of rows, except how many blocks there are: a row's arithmetic, and with it every
bit of its result, is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cuda_launch import Geometry
from ..policy import MAX_BLOCK, WARP, Choice, ceil_div, first, next_power_of_two

ACCESS = 16  # bytes: the widest access of one thread
HELD = 2  # packs that a thread of the norm keeps in registers (csrc/cuda/layers/rms_norm_sm80.cuh: kHeld)
NORM_THREADS = 128  # smallest block of the norm: four warps, so that short rows fill a multiprocessor's warp slots
ELEMENTWISE_THREADS = 256
MAX_GRID_Y = 65535


def pack(element_sizes: tuple[int, ...], lengths: tuple[int, ...], is_aligned: bool) -> Choice[int]:
    """Elements an access: 16 bytes of the narrowest type, or one.

    Args:
        element_sizes: bytes of an element, of each tensor that is accessed in packs.
        lengths: what has to be whole packs.
        is_aligned: every row starts on an address that allows packs.
    """

    def objection(width: int) -> str:
        if width == 1:
            return ""
        if not is_aligned:
            return f"a row does not start on a multiple of {ACCESS} bytes"
        odd = [n for n in lengths if n % width]
        return f"{odd[0]} elements are no whole number of packs of {width}" if odd else ""

    return first((ACCESS // min(element_sizes), 1), objection)


def norm(rows: int, width: int, pack: int) -> Geometry:
    """The norm: threads along x share a row, short rows share a block along y.

    Args:
        rows: how many.
        width: elements of a row.
        pack: elements that a thread owns side by side.
    """
    packs = ceil_div(width, pack)
    threads = min(MAX_BLOCK, max(WARP, next_power_of_two(ceil_div(packs, HELD))))
    together = max(1, NORM_THREADS // threads)
    return Geometry(grid=(ceil_div(rows, together), 1, 1), block=(threads, together, 1))


def elementwise(rows: int, width: int, elements: int) -> Geometry:
    """One pack a thread: packs along x, short rows share a block along y; blocks over rows, then along a row.

    Raises:
        ValueError: a row has more packs than 65535 blocks can hold.
    """
    packs = ceil_div(width, elements)
    threads = min(ELEMENTWISE_THREADS, max(WARP, next_power_of_two(packs)))
    together = ELEMENTWISE_THREADS // threads
    along = ceil_div(packs, threads)
    if along > MAX_GRID_Y:
        raise ValueError(f"a row of {width} elements needs {along} blocks; the limit is {MAX_GRID_Y}")
    return Geometry(grid=(ceil_div(rows, together), along, 1), block=(threads, together, 1))


def rotary(tokens: int, heads: int, head_dim: int, half: int, elements: int) -> Geometry:
    """A block a token: the items of a head along x, heads along y, as many as 256 threads hold.

    Args:
        tokens: how many.
        heads: of q and k together.
        head_dim: elements of a head.
        half: pairs that turn.
        elements: of one access.
    """
    items = half // elements + (head_dim - 2 * half) // elements
    along = min(ELEMENTWISE_THREADS, max(1, items))
    together = max(1, min(heads, ELEMENTWISE_THREADS // along))
    return Geometry(grid=(tokens, 1, 1), block=(along, together, 1))


@dataclass(frozen=True)
class TritonTile:
    """A Triton program's share: `rows` rows (or heads), `block` elements of each at a time; and its warps."""

    rows: int
    block: int
    num_warps: int


# Every tile that the functions below can choose: tests/codegen compiles each of them.
NORM_TILES = (TritonTile(1, 128, 1), TritonTile(1, 512, 1), TritonTile(1, 2048, 4), TritonTile(1, 8192, 8))
ELEMENTWISE_TILES = (TritonTile(16, 64, 4), TritonTile(1, 1024, 4))
ROTARY_TILES = (TritonTile(8, 32, 1), TritonTile(8, 64, 2), TritonTile(4, 256, 4))


def _tile(tiles: tuple[TritonTile, ...], length: int) -> Choice[TritonTile]:
    """The narrowest tile that holds `length` elements; the widest, in several steps, if none does."""

    def objection(tile: TritonTile) -> str:
        return "" if length <= tile.block or tile is tiles[-1] else f"{length} elements do not fit into {tile.block}"

    return first(tiles, objection)


def triton_norm(width: int) -> Choice[TritonTile]:
    """The norm in Triton: a row a program, read in one step up to 8192 elements, in steps of 8192 beyond."""
    return _tile(NORM_TILES, width)


def triton_elementwise(width: int) -> Choice[TritonTile]:
    """Elementwise work in Triton: a program takes about 1024 elements, of one row or of several short ones."""
    return _tile(ELEMENTWISE_TILES, width)


def triton_rotary(half: int) -> Choice[TritonTile]:
    """The rotary embedding in Triton: a program turns `half` pairs of a few heads of one token."""
    return _tile(ROTARY_TILES, half)
