"""Weight matrices, dense or quantised, as the native kernels see them."""

from __future__ import annotations

import torch

from .dtypes import CODES
from .quantized import QuantizedWeight


def weight_arguments(w: QuantizedWeight | torch.Tensor) -> tuple[int, int, int, int, int]:
    """(address, rows N, columns K, bytes from one row to the next, code of the format)."""
    if isinstance(w, QuantizedWeight):
        return w.native
    rows, columns = w.shape
    return w.data_ptr(), rows, columns, w.stride(0) * w.element_size(), CODES[w.dtype]
