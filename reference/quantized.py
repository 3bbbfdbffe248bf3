"""Dequantisation of the GGUF weight formats, and the matrix product with such a weight.

Every decoder takes the blocks of a weight as uint8 [B, block_bytes] and gives float32 [B, block_size], with the
operations in the order in which GGML's own definition has them, so that the result is equal bit for bit. `d` is a
block's scale and `m` its offset, in float16; `q` are its integers. The weight is used by its attributes `format`,
`shape` and `data`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _half(block_bytes: Tensor) -> Tensor:
    """Two bytes [B, 2] as a float16, widened: float32 [B, 1]."""
    return block_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 2n]: all low nibbles first, then all high ones."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 8n]: the bits of each byte, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).float() + _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks[:, :2]) * (q.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks[:, :2]) * q.float() + _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of a Q4_K or Q5_K block, 6 bits each in 12 bytes: two float32 [B, 8].

    Bytes 0-3 and 4-7 hold the scales and minima 0-3 in their low 6 bits; scales and minima 4-7 take their low 4 bits
    from bytes 8-11 and their high 2 bits from the top of bytes 0-3 and 4-7.
    """
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], dim=-1)
    minima = torch.cat([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], dim=-1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _k_values(blocks, scales, minima, q)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Byte j of the high bits holds the fifth bit of element j of each of the 8 groups, group g in bit g.
    high = _bits(blocks[:, 16:48]).reshape(-1, 32, 8).transpose(1, 2)
    return _k_values(blocks, scales, minima, low | (high << 4))


def _k_values(blocks: Tensor, scales: Tensor, minima: Tensor, q: Tensor) -> Tensor:
    """(d * scale) * q - (dmin * minimum), a group of 32 at a time: [B, 256]."""
    d, d_min = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    return ((d * scales)[..., None] * q.float() - (d_min * minima)[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    q = (low | (high << 4)).float() - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[..., None] * q.reshape(-1, 16, 16)).flatten(1)


# The e2m1 values, doubled; the scale below is halved to match.
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    # 2^(e - 128). The two smallest are subnormal in float32, where the exponent field cannot hold them.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    values = torch.tensor(_MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    return bits.int().view(torch.float32) * values[_nibbles(blocks[:, 1:]).long()]


# format -> (bytes of a block, decoder)
_DECODERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "q4_0": (18, _q4_0),
    "q4_1": (20, _q4_1),
    "q5_0": (22, _q5_0),
    "q5_1": (24, _q5_1),
    "q8_0": (34, _q8_0),
    "q4_k": (144, _q4_k),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
    "mxfp4": (17, _mxfp4),
}


def dequantize(weight: Any, rows: Tensor | None = None) -> Tensor:
    """The numbers that a quantised weight stands for.

    Args:
        weight: a QuantizedWeight of shape (N, K): `format`, `shape`, and `data` uint8 [N, bytes_per_row].
        rows: int64 [T], which rows to decode, each in 0 .. N - 1; all of them by default.

    Returns:
        float32 [N, K], or [T, K] for chosen rows, equal bit for bit to GGML's definition of the format.

    Raises:
        ValueError: the format has no decoder.
    """
    if weight.format not in _DECODERS:
        raise ValueError(f"format is {weight.format!r}; it should be one of {', '.join(_DECODERS)}")
    block_bytes, decode = _DECODERS[weight.format]
    data = weight.data if rows is None else weight.data[rows]
    return decode(data.reshape(-1, block_bytes)).reshape(len(data), weight.shape[1])


def quantized_matmul(x: Tensor, w: Any, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias, in float64 and rounded once to x.dtype.

    Args:
        x: [..., K], any floating dtype.
        w: (N, K), a QuantizedWeight or a dense tensor.
        bias: [N] or None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: the weight's format has no decoder.
    """
    dense = w if isinstance(w, Tensor) else dequantize(w)
    out = x.double() @ dense.double().T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)


OPERATIONS: dict[str, Callable[..., Any]] = {"quantized_matmul": quantized_matmul}
