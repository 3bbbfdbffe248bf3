"""The layers on the CPU: hands addresses and strides to csrc/cpu/layers.cpp."""

from __future__ import annotations

import torch

from .. import _cpu
from ..dispatch import implements
from ..dtypes import CODES
from ..quantized import QuantizedWeight
from ..rows import as_rows, write_rows
from ..weights import weight_arguments


@implements("rms_norm", "cpu")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor) -> None:
    shape = x.shape
    if len(shape) != 2:
        source = as_rows(x)
        return write_rows(out, lambda target: rms_norm(source, weight, eps, weight_offset, target))
    rows, columns = shape
    _cpu.rms_norm(
        rows,
        columns,
        x.data_ptr(),
        columns if x.is_contiguous() else x.stride()[0],  # asking for the strides takes longer
        weight.data_ptr(),
        eps,
        weight_offset,
        out.data_ptr(),
        columns if out.is_contiguous() else out.stride()[0],
        CODES[x.dtype],
        CODES[weight.dtype],
    )


@implements("fused_add_rms_norm", "cpu")
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    if x.dim() != 2:
        inputs = (as_rows(x), as_rows(residual), weight, eps, weight_offset)
        return write_rows(
            out[0], lambda normed: write_rows(out[1], lambda total: fused_add_rms_norm(*inputs, (normed, total)))
        )
    normed, total = out
    _cpu.fused_add_rms_norm(
        *x.shape,
        x.data_ptr(),
        x.stride()[0],
        residual.data_ptr(),
        residual.stride()[0],
        weight.data_ptr(),
        eps,
        weight_offset,
        normed.data_ptr(),
        normed.stride()[0],
        total.data_ptr(),
        total.stride()[0],
        CODES[x.dtype],
        CODES[weight.dtype],
    )


def _heads(x: torch.Tensor) -> tuple[int, int, int, int]:
    token_stride, head_stride, _ = x.stride()
    return (x.data_ptr(), x.shape[1], token_stride, head_stride)


@implements("rotary", "cpu")
def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    tokens, _, head_dim = q.shape
    max_position, rotary_dim = cos_sin.shape
    q_heads, k_heads = _heads(q), _heads(k)
    _cpu.rotary(
        tokens,
        head_dim,
        rotary_dim,
        max_position,
        q_heads,
        k_heads,
        q_heads if out[0] is q else _heads(out[0]),
        k_heads if out[1] is k else _heads(out[1]),
        positions.data_ptr(),
        positions.dtype == torch.int64,
        cos_sin.data_ptr(),
        interleaved,
        CODES[q.dtype],
    )


_ACTIVATIONS = {"silu": 0, "tanh": 1, "none": 2}


def _gated(x: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    shape = out.shape
    if len(shape) != 2:
        source = as_rows(x)
        return write_rows(out, lambda target: _gated(source, activation, target))
    rows, columns = shape
    _cpu.gated_activation(
        rows,
        columns,
        x.data_ptr(),
        2 * columns if x.is_contiguous() else x.stride()[0],
        out.data_ptr(),
        columns if out.is_contiguous() else out.stride()[0],
        _ACTIVATIONS[activation],
        CODES[x.dtype],
    )


@implements("silu_and_mul", "cpu")
def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    _gated(x, "silu", out)


@implements("gelu_and_mul", "cpu")
def gelu_and_mul(x: torch.Tensor, approximate: str, out: torch.Tensor) -> None:
    _gated(x, approximate, out)


@implements("embedding", "cpu")
def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    scale: float,
    out_dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    _cpu.decode_rows(
        ids.shape[0],
        ids.data_ptr(),
        ids.dtype == torch.int64,
        *weight_arguments(weight),
        scale,
        out.data_ptr(),
        out.stride()[0],
        CODES[out_dtype],
    )
