"""Fragment layouts of mma and ldmatrix, derived a second time and in another way than csrc/cuda/ptx/mma_host.cpp.

The C++ model scatters each register to a (row, column) by one formula for all widths. Here a layout is a function from
(thread, value) to a position, written in the algebra of shapes and strides that CUTLASS uses: thread and value indices
are split into digits by a shape (first digit fastest), and each digit advances the position by a stride. Positions
count down the columns of the tile, so for M x K: position = m + M*k. The tables below were worked out by hand from the
instruction's figures, per instruction; the tests hold the two against each other, and both against a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """(thread, value) -> position, as digits and strides."""

    thread_shape: tuple[int, ...]
    thread_stride: tuple[int, ...]
    value_shape: tuple[int, ...]
    value_stride: tuple[int, ...]

    @staticmethod
    def _offset(index: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
        offset = 0
        for size, step in zip(shape, stride, strict=True):
            offset += index % size * step
            index //= size
        return offset

    def position(self, thread: int, value: int) -> int:
        return self._offset(thread, self.thread_shape, self.thread_stride) + self._offset(
            value, self.value_shape, self.value_stride
        )

    def values(self) -> int:
        return int(np.prod(self.value_shape))

    def coordinates(self, rows: int) -> np.ndarray:
        """[32, values, 2]: the (row, column) that each thread holds."""
        table = [[divmod(self.position(t, v), rows)[::-1] for v in range(self.values())] for t in range(32)]
        return np.array(table)


# The accumulator of every m16n8: lanes 4g..4g+3 share row g, two neighbours each; then the same eight rows below.
ACCUMULATOR = Layout((4, 8), (32, 1), (2, 2), (16, 8))

# A (16 x K) and B (stored as N x K, 8 x K, because mma takes it column-major), by the bits of an element.
OPERAND_A = {
    16: Layout((4, 8), (32, 1), (2, 2, 2), (16, 8, 128)),
    8: Layout((4, 8), (64, 1), (4, 2, 2), (16, 8, 256)),
    32: Layout((4, 8), (16, 1), (2, 2), (8, 64)),
}
OPERAND_B = {
    16: Layout((4, 8), (16, 1), (2, 2), (8, 64)),
    8: Layout((4, 8), (32, 1), (4, 2), (8, 128)),
    32: Layout((4, 8), (8, 1), (2,), (32,)),
}


def depth(bits: int) -> int:
    """K of the instruction: 256 bits of every row."""
    return 256 // bits


def scatter_a(tile: np.ndarray, bits: int) -> np.ndarray:
    """A 16 x K tile of integers that hold `bits` bits -> the registers [32, 4] that its lanes hold."""
    return _pack(tile, OPERAND_A[bits].coordinates(16), bits)


def scatter_b(tile: np.ndarray, bits: int) -> np.ndarray:
    """A K x 8 tile -> the registers [32, 2]."""
    return _pack(tile.T, OPERAND_B[bits].coordinates(8), bits)


def gather_accumulator(registers: np.ndarray) -> np.ndarray:
    """[32, 4] -> 16 x 8."""
    tile = np.zeros((16, 8), registers.dtype)
    for thread, row in enumerate(ACCUMULATOR.coordinates(16)):
        for value, (m, n) in enumerate(row):
            tile[m, n] = registers[thread, value]
    return tile


def scatter_accumulator(tile: np.ndarray) -> np.ndarray:
    at = ACCUMULATOR.coordinates(16)
    return tile[at[..., 0], at[..., 1]]


def _pack(tile: np.ndarray, at: np.ndarray, bits: int) -> np.ndarray:
    elements = tile[at[..., 0], at[..., 1]].astype(np.uint64)
    per_register = 32 // bits
    elements = elements.reshape(32, -1, per_register)
    shifts = np.arange(per_register, dtype=np.uint64) * np.uint64(bits)
    return (elements << shifts).sum(-1).astype(np.uint32)
