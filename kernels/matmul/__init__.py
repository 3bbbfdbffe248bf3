"""Matrix products with the weights of linear layers, dense or in any format of `QuantizedWeight`."""

from __future__ import annotations

import torch

from .. import checks
from ..dispatch import Operation
from ..dtypes import FLOATS
from ..quantized import QuantizedWeight

__all__ = ["quantized_matmul"]

_quantized_matmul = Operation("quantized_matmul", __name__)


def quantized_matmul(
    x: torch.Tensor,
    w: QuantizedWeight | torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """x @ w.T + bias, what a linear layer computes.

    A quantised weight stands for the numbers that its format's definition gives, in float32; activations are not
    quantised. Sums are float32 and are rounded once, to x's dtype. The result of a row depends on that row, the weight
    and the backend alone: not on the other rows, their number or the number of threads, bit for bit.

    Args:
        x: [..., K] float32, float16 or bfloat16; any strides with a contiguous last dimension.
        w: of shape (N, K), a `QuantizedWeight`, or a tensor of one of these dtypes with contiguous rows.
        bias: [N] contiguous, any of these dtypes; added before the rounding.
        out: like the result, which may be columns of a wider tensor, so that several layers fill one buffer; must not
            overlap the other arguments.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    shape, dtype, device = x.shape, x.dtype, x.device
    _check_product(x, w, shape, dtype, device)
    features = w.shape[0]
    if bias is not None:
        _check_bias(bias, features, device)
    result = (*shape[:-1], features)
    if out is not None:
        checks.output("out", out, result, dtype, device)
    args = (x, w, bias)
    run = _quantized_matmul.select(device, backend, *args)
    if out is None:
        out = torch.empty(result, dtype=dtype, device=device)
    run(*args, out)
    return out


def _check_product(
    x: torch.Tensor,
    w: QuantizedWeight | torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if (
        shape
        and dtype in FLOATS
        and x.stride()[-1] == 1
        and (
            (w.dtype in FLOATS and w.dim() == 2 and w.stride()[1] == 1)
            if isinstance(w, torch.Tensor)
            else isinstance(w, QuantizedWeight)
        )
        and shape[-1] == w.shape[1]
        and w.device == device
    ):
        return
    checks.dtype("x", x, FLOATS)
    if not shape:
        raise ValueError("x has no dimensions; it should be [..., K]")
    checks.contiguous_rows("x", x)
    if isinstance(w, torch.Tensor):
        checks.dtype("w", w, FLOATS)
        checks.rank("w", w, 2, "[N, K]")
        checks.contiguous_rows("w", w)
    elif not isinstance(w, QuantizedWeight):
        raise ValueError(f"w is a {type(w).__name__}; it should be a QuantizedWeight or a tensor")
    if shape[-1] != w.shape[1]:
        raise ValueError(
            f"x has shape {list(shape)}; its last dimension should be K = {w.shape[1]}, as w has shape {list(w.shape)}"
        )
    if w.device != device:
        raise ValueError(f"w is on {w.device} and x on {device}; they should be on one device")


def _check_bias(bias: torch.Tensor, features: int, device: torch.device) -> None:
    if bias.shape == (features,) and bias.dtype in FLOATS and bias.stride() == (1,) and bias.device == device:
        return
    checks.dtype("bias", bias, FLOATS)
    checks.shape("bias", bias, (features,), "N, the rows of w")
    checks.contiguous_rows("bias", bias)
    if bias.device != device:
        raise ValueError(f"bias is on {bias.device} and x on {device}; they should be on one device")
