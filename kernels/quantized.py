"""One container for every low-precision weight format.

A linear layer's weight is a matrix of N output features by K input features. A `QuantizedWeight` holds it as the bytes
of its format and never as numbers: each backend of `quantized_matmul` decodes what it needs where it needs it.

The GGUF formats store a row as K / block_size blocks laid end to end, each with its own scale, so `data` is a plain
[N, bytes_per_row] matrix of bytes, often a view of the file's memory mapping. Rows may therefore be sliced, gathered
and permuted without decoding anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .dtypes import FORMAT_CODES


@dataclass(frozen=True)
class BlockFormat:
    """How a row is cut: `block_size` weights share one block of `block_bytes` bytes."""

    block_size: int
    block_bytes: int


# Sizes as in GGML's block structs: scales in float16 (MXFP4: one e8m0 byte), then high bits, then packed integers.
FORMATS: dict[str, BlockFormat] = {
    "q4_0": BlockFormat(32, 2 + 16),
    "q4_1": BlockFormat(32, 2 + 2 + 16),
    "q5_0": BlockFormat(32, 2 + 4 + 16),
    "q5_1": BlockFormat(32, 2 + 2 + 4 + 16),
    "q8_0": BlockFormat(32, 2 + 32),
    "q4_k": BlockFormat(256, 2 + 2 + 12 + 128),
    "q5_k": BlockFormat(256, 2 + 2 + 12 + 32 + 128),
    "q6_k": BlockFormat(256, 128 + 64 + 16 + 2),
    "mxfp4": BlockFormat(32, 1 + 16),
}


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight matrix [N, K] in the bytes of its format.

    Args:
        format: a key of `FORMATS`.
        shape: (N output features, K input features).
        data: uint8 [N, K / block_size * block_bytes], the last dimension contiguous; may be a view of a mapped file.
        scales: further per-group scales, for formats that keep them apart from the data.
        zeros: further zero points, likewise.
        g_idx: the group of each input feature, for formats that reorder them.

    Raises:
        ValueError: an unknown format, sizes that do not fit it, or tensors of the wrong dtype, shape or device.
    """

    format: str
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout = FORMATS.get(self.format)
        if layout is None:
            raise ValueError(f"format is {self.format!r}; it should be one of {', '.join(FORMATS)}")
        if len(self.shape) != 2 or any(not isinstance(n, int) or n <= 0 for n in self.shape):
            raise ValueError(f"shape is {self.shape!r}; it should be two positive integers (N, K)")
        rows, columns = self.shape
        if columns % layout.block_size:
            raise ValueError(
                f"shape {self.shape}: K = {columns} is not a multiple of the {self.format} block of {layout.block_size}"
            )
        if self.data.dtype != torch.uint8:
            raise ValueError(f"data is {self.data.dtype}; it should be torch.uint8")
        expected = (rows, columns // layout.block_size * layout.block_bytes)
        if tuple(self.data.shape) != expected:
            raise ValueError(
                f"data has shape {tuple(self.data.shape)}; a {self.format} weight of shape {self.shape} has "
                f"{expected} bytes"
            )
        if self.data.stride(1) != 1:
            raise ValueError(
                f"data has stride {self.data.stride(1)} along a row; the bytes of a row should be contiguous"
            )
        for name in ("scales", "zeros", "g_idx"):
            extra = getattr(self, name)
            if extra is not None and extra.device != self.data.device:
                raise ValueError(
                    f"{name} is on {extra.device} and data on {self.data.device}; they should be on one device"
                )

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of storage, all tensors together."""
        tensors = (self.data, self.scales, self.zeros, self.g_idx)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @cached_property
    def native(self) -> tuple[int, int, int, int, int]:
        """What a native kernel is told: (address, rows, columns, bytes from row to row, the format's code).

        Kept, because it would be a good part of what a call costs in Python.
        """
        return self.data.data_ptr(), *self.shape, self.data.stride(0), FORMAT_CODES[self.format]

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on another device (itself when it is there already)."""
        device = torch.device(device)
        if device == self.device:
            return self
        extras = (None if t is None else t.to(device) for t in (self.scales, self.zeros, self.g_idx))
        return QuantizedWeight(self.format, self.shape, self.data.to(device), *extras)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Output features start..stop-1 as a weight of their own; a view, nothing is copied.

        Raises:
            ValueError: the range is empty or not within the weight, or the format keeps tensors beside `data`.
        """
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows [{start}, {stop}) should be a range within the weight's {self.shape[0]} rows")
        if self.scales is not None or self.zeros is not None or self.g_idx is not None:
            raise ValueError(f"rows of a {self.format} weight with separate scales cannot be sliced")
        return replace(self, shape=(stop - start, self.shape[1]), data=self.data[start:stop])
