"""The small operations between the matrix products, each computed in float64 and rounded once.

A row's result depends on nothing but the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .quantized import dequantize

Tensor = torch.Tensor


def _normalize(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    mean_square = (x * x).mean(dim=-1, keepdim=True)
    return x / (mean_square + eps).sqrt() * (weight.double() + weight_offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        weight_offset: added to every weight.

    Returns:
        [..., D] in x's dtype.
    """
    return _normalize(x.double(), weight, eps, weight_offset).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the norm is of the sum before it is rounded.

    Args:
        x: [..., D].
        residual: like x.
        weight: [D].
        eps: added to the mean square.
        weight_offset: added to every weight.

    Returns:
        Two tensors [..., D] in x's dtype.
    """
    total = x.double() + residual.double()
    return _normalize(total, weight, eps, weight_offset).to(x.dtype), total.to(x.dtype)


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turns pairs of each head's first rotary_dim dimensions by the angle that the table has for the token's position.

    Args:
        q: [T, num_q_heads, head_dim].
        k: [T, num_kv_heads, head_dim].
        positions: [T]; the turned dimensions of a token whose position lies outside the table become NaN.
        cos_sin: [max_position, rotary_dim], a row's cosines and then its sines.
        interleaved: pairs are (2i, 2i + 1) rather than (i, i + rotary_dim / 2).

    Returns:
        q and k turned, the dimensions from rotary_dim on as they were.
    """
    max_position, rotary_dim = cos_sin.shape
    inside = (positions >= 0) & (positions < max_position)
    table = cos_sin.new_full((len(positions), rotary_dim), float("nan"), dtype=torch.float64)
    table[inside] = cos_sin[positions[inside].long()].double()
    cos, sin = table[:, None].chunk(2, dim=-1)

    def turn(heads: Tensor) -> Tensor:
        turned = heads.double()
        if interleaved:
            first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
        else:
            first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
        a, b = turned[..., first], turned[..., second]
        result = turned.clone()
        result[..., first] = a * cos - b * sin
        result[..., second] = b * cos + a * sin
        return result.to(heads.dtype)

    return turn(q), turn(k)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        x: [..., 2 F], the gate's F values and then up's.

    Returns:
        [..., F] in x's dtype.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * up.

    Args:
        x: [..., 2 F], the gate's F values and then up's.
        approximate: "tanh", or "none" for the normal distribution function itself.

    Returns:
        [..., F] in x's dtype.
    """
    gate, up = x.double().chunk(2, dim=-1)
    # PyTorch's own forms subtract from one, and lose the left tail even in float64.
    if approximate == "tanh":
        share = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        share = torch.special.erfc(-gate / math.sqrt(2)) / 2
    return (gate * share * up).to(x.dtype)


def embedding(ids: Tensor, weight: Any, scale: float = 1.0, out_dtype: torch.dtype | None = None) -> Tensor:
    """scale * weight[ids]; an id that is no row of the weight gives a row of zeros.

    Args:
        ids: [T].
        weight: [V, D], a tensor or a QuantizedWeight.
        scale: multiplies every element.
        out_dtype: of the result; by default the weight's, and float32 for a quantised weight.

    Returns:
        [T, D] in out_dtype.
    """
    dense = isinstance(weight, Tensor)
    vocab_size, width = weight.shape
    known = (ids >= 0) & (ids < vocab_size)
    rows = ids[known].long()
    result = torch.zeros(len(ids), width, dtype=torch.float64, device=ids.device)
    result[known] = (weight[rows] if dense else dequantize(weight, rows)).double() * scale
    return result.to(out_dtype or (weight.dtype if dense else torch.float32))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary": rotary,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "embedding": embedding,
}
