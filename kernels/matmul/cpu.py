"""Matrix products on the CPU: hands addresses and strides to csrc/cpu/matmul.cpp."""

from __future__ import annotations

import torch

from .. import _cpu
from ..dispatch import implements
from ..dtypes import CODES
from ..quantized import QuantizedWeight
from ..rows import as_rows, write_rows
from ..weights import weight_arguments


@implements("quantized_matmul", "cpu")
def quantized_matmul(
    x: torch.Tensor, w: QuantizedWeight | torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if x.dim() != 2:
        source = as_rows(x)
        return write_rows(out, lambda target: quantized_matmul(source, w, bias, target))
    code = CODES[x.dtype]
    _cpu.quantized_matmul(
        x.shape[0],
        x.data_ptr(),
        x.stride()[0],
        *weight_arguments(w),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride()[0],
        code,
        code if bias is None else CODES[bias.dtype],
    )
