"""The layers on the CPU: hands addresses and strides to csrc/cpu/layers.cpp."""

from __future__ import annotations

from typing import Any

import torch

from .. import _cpu
from ..dispatch import YES, Support, implements
from ..dtypes import CODES
from ..rows import as_rows, write_rows


def _always(*args: Any) -> Support:
    return YES


@implements("rms_norm", "cpu", supports=_always)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor) -> None:
    source = as_rows(x)

    def write(target: torch.Tensor) -> None:
        rows, columns = source.shape
        _cpu.rms_norm(
            rows,
            columns,
            source.data_ptr(),
            source.stride(0),
            weight.data_ptr(),
            eps,
            weight_offset,
            target.data_ptr(),
            target.stride(0),
            CODES[x.dtype],
            CODES[weight.dtype],
        )

    write_rows(out, write)


@implements("fused_add_rms_norm", "cpu", supports=_always)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    source, added = as_rows(x), as_rows(residual)

    def write(normed: torch.Tensor, total: torch.Tensor) -> None:
        rows, columns = source.shape
        _cpu.fused_add_rms_norm(
            rows,
            columns,
            source.data_ptr(),
            source.stride(0),
            added.data_ptr(),
            added.stride(0),
            weight.data_ptr(),
            eps,
            weight_offset,
            normed.data_ptr(),
            normed.stride(0),
            total.data_ptr(),
            total.stride(0),
            CODES[x.dtype],
            CODES[weight.dtype],
        )

    write_rows(out[0], lambda normed: write_rows(out[1], lambda total: write(normed, total)))


def _heads(x: torch.Tensor) -> tuple[int, int, int, int]:
    return (x.data_ptr(), x.shape[1], x.stride(0), x.stride(1))


@implements("rotary", "cpu", supports=_always)
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
    _cpu.rotary(
        tokens,
        head_dim,
        rotary_dim,
        max_position,
        _heads(q),
        _heads(k),
        _heads(out[0]),
        _heads(out[1]),
        positions.data_ptr(),
        positions.dtype == torch.int64,
        cos_sin.data_ptr(),
        interleaved,
        CODES[q.dtype],
    )


_ACTIVATIONS = {"silu": 0, "tanh": 1, "none": 2}


def _gated(x: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    source = as_rows(x)

    def write(target: torch.Tensor) -> None:
        rows, columns = target.shape
        _cpu.gated_activation(
            rows,
            columns,
            source.data_ptr(),
            source.stride(0),
            target.data_ptr(),
            target.stride(0),
            _ACTIVATIONS[activation],
            CODES[x.dtype],
        )

    write_rows(out, write)


@implements("silu_and_mul", "cpu", supports=_always)
def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    _gated(x, "silu", out)


@implements("gelu_and_mul", "cpu", supports=_always)
def gelu_and_mul(x: torch.Tensor, approximate: str, out: torch.Tensor) -> None:
    _gated(x, approximate, out)
