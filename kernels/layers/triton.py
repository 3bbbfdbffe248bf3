"""The layers in Triton; on host tensors in Triton's interpreter.

All are bound by memory and move the bytes that csrc/cuda/layers states for each. A program takes whole rows or pieces
of rows, and computes in float32. The tile comes from `policy` and depends on a row's length alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from .. import strides, triton_support
from ..dispatch import YES, Support, implements, no
from ..dtypes import FLOATS
from ..policy import ceil_div
from ..quantized import QuantizedWeight
from ..triton_support import Configuration, pointer
from . import policy


@triton.jit
def _row_offset(row, inner_rows, outer_stride, inner_stride):  # type: ignore[no-untyped-def]
    """Where row `row` starts, when `inner_rows` rows follow each other along the inner dimension."""
    outer = row // inner_rows
    return outer.to(tl.int64) * outer_stride + (row - outer * inner_rows).to(tl.int64) * inner_stride


@triton.jit
def _norm_input(x, residual, at, mask, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _norm_output(values, scale, weight, offset, out, sum_out, at, mask, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    weights = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(out + at, (values * scale * weights).to(out.dtype.element_ty), mask=mask)
    if ADD:
        tl.store(sum_out + at, values.to(sum_out.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    sum_out,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    out_outer,
    out_inner,
    sum_outer,
    sum_inner,
    inner_rows,
    width,
    eps,
    offset,
    ADD: tl.constexpr,
    ONE_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. A row of several steps is read twice, before anything of the step is written."""
    row = tl.program_id(0)
    x += _row_offset(row, inner_rows, x_outer, x_inner)
    out += _row_offset(row, inner_rows, out_outer, out_inner)
    if ADD:
        residual += _row_offset(row, inner_rows, residual_outer, residual_inner)
        sum_out += _row_offset(row, inner_rows, sum_outer, sum_inner)
    lanes = tl.arange(0, BLOCK)
    if ONE_STEP:
        values = _norm_input(x, residual, lanes, lanes < width, ADD)
        scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
        _norm_output(values, scale, weight, offset, out, sum_out, lanes, lanes < width, ADD)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            at = start + lanes
            values = _norm_input(x, residual, at, at < width, ADD)
            squares += values * values
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            at = start + lanes
            values = _norm_input(x, residual, at, at < width, ADD)
            _norm_output(values, scale, weight, offset, out, sum_out, at, at < width, ADD)


@triton.jit
def _exp_negative(x):  # type: ignore[no-untyped-def]
    """exp(x) of x <= 0 to two units in the last place; the device's own is 2^(x log2 e), off by |x| / 4 more."""
    x = tl.maximum(x, -126.0)  # far below float32, and 2^n is made of two factors that are not
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - n * 0.693145751953125) - n * 1.428606765330187e-06  # ln 2 in two parts; n times the first is exact
    half = tl.floor(n * 0.5).to(tl.int32)
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((n.to(tl.int32) - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(rest * 1.4426950408889634) * first * second


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    small = _exp_negative(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0, small, 1.0), 1.0 + small)


@triton.jit
def _normal_cdf(x):  # type: ignore[no-untyped-def]
    """The normal distribution function to a few units in the last place, in its left tail as well.

    It is erfc(z) / 2 with z = -x / sqrt(2), and exp(z^2) erfc(z) = t P(t) with t = 1 / (1 + z / 2): P is a Chebyshev
    fit of degree 8 over 0 <= z <= 12, of relative error 5e-8.
    """
    t = tl.div_rn(1.0, 1.0 + tl.abs(x) * 0.35355339059327373)
    p = -0.0601972491 * t + 0.28986904
    p = p * t - 0.497684866
    p = p * t + 0.289468139
    p = p * t - 0.0340365209
    p = p * t + 0.205621541
    p = p * t + 0.242415696
    p = p * t + 0.282462269
    p = p * t + 0.282081902
    tail = 0.5 * _exp_negative(x * x * -0.5) * t * p
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    x,
    out,
    x_outer,
    x_inner,
    out_outer,
    out_inner,
    rows,
    inner_rows,
    width,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (at < width)
    x += _row_offset(row, inner_rows, x_outer, x_inner) + at
    out += _row_offset(row, inner_rows, out_outer, out_inner) + at
    gate = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + width, mask=mask, other=0.0).to(tl.float32)
    if GATE == "silu":
        gate *= _sigmoid(gate)
    elif GATE == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u; 2 sqrt(2 / pi) is in front.
        gate *= _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= _normal_cdf(gate)
    tl.store(out, (gate * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _turn_heads(  # type: ignore[no-untyped-def]
    x,
    out,
    x_stride,
    out_stride,
    head,
    heads,
    cosines,
    sines,
    half,
    head_dim,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x += head.to(tl.int64)[:, None] * x_stride
    out += head.to(tl.int64)[:, None] * out_stride
    present = (head < heads)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = present & (pair < half)
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + first, (a * cosines - b * sines).to(out.dtype.element_ty), mask=mask)
    tl.store(out + second, (b * cosines + a * sines).to(out.dtype.element_ty), mask=mask)
    for start in range(2 * half, head_dim, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        mask = present & (at < head_dim)
        tl.store(out + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def _rotary(  # type: ignore[no-untyped-def]
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    q_out_token,
    q_out_head,
    k_out_token,
    k_out_head,
    q_heads,
    k_heads,
    head_dim,
    half,
    max_position,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token and HEADS of its heads a program; the groups of k's heads come after those of q."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    # A position outside the table reads nothing and has NaN for its cosine and sine.
    pair = tl.arange(0, BLOCK)[None, :]
    pairs = tl.where((position >= 0) & (position < max_position), half, 0)
    known = pair < pairs
    row = cos_sin + position * (2 * half) + pair
    cosines = tl.load(row, mask=known, other=float("nan"))
    sines = tl.load(row + half, mask=known, other=float("nan"))
    q_groups = tl.cdiv(q_heads, HEADS)
    if group < q_groups:
        head = group * HEADS + tl.arange(0, HEADS)
        q += token * q_token
        q_out += token * q_out_token
        _turn_heads(q, q_out, q_head, q_out_head, head, q_heads, cosines, sines, half, head_dim, INTERLEAVED, BLOCK)
    else:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)
        k += token * k_token
        k_out += token * k_out_token
        _turn_heads(k, k_out, k_head, k_out_head, head, k_heads, cosines, sines, half, head_dim, INTERLEAVED, BLOCK)


@triton.jit
def _embedding(  # type: ignore[no-untyped-def]
    ids,
    weight,
    out,
    weight_stride,
    out_stride,
    tokens,
    vocabulary,
    width,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.load(ids + token, mask=token < tokens, other=-1).to(tl.int64)
    known = ((row >= 0) & (row < vocabulary))[:, None] & (at < width)
    values = tl.load(weight + row[:, None] * weight_stride + at, mask=known, other=0.0).to(tl.float32) * scale
    out += token.to(tl.int64)[:, None] * out_stride + at
    tl.store(out, values.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (at < width))


MAX_PROGRAMS = 2**31 - 1


def _supported(tensor: torch.Tensor) -> Support:
    rows = tensor.numel() // max(1, tensor.shape[-1])
    return YES if rows <= MAX_PROGRAMS else no(f"{rows} rows", f"at most {MAX_PROGRAMS}")


def _first_supported(x: torch.Tensor, *args: Any) -> Support:
    return _supported(x)


@implements("rms_norm", "triton", supports=_first_supported)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor) -> None:
    _norm((x, x, out, out), weight, eps, weight_offset, add=False)


@implements("fused_add_rms_norm", "triton", supports=_first_supported)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    _norm((x, residual, *out), weight, eps, weight_offset, add=True)


def _norm(
    tensors: tuple[torch.Tensor, ...], weight: torch.Tensor, eps: float, weight_offset: float, *, add: bool
) -> None:
    """`tensors` are x, the residual, the normed output and the sum; the second and fourth count only with `add`."""
    width = tensors[0].shape[-1]
    tile = policy.triton_norm(width).taken
    for part in strides.each(*tensors):
        x, residual, out, total = part.tensors
        steps = itertools.chain(*part.strides)
        arguments = (x, residual, weight, out, total, *steps, part.inner, width, eps, weight_offset)
        constants = {"ADD": add, "ONE_STEP": width <= tile.block, "BLOCK": tile.block}
        triton_support.launch(_rms_norm, (part.count,), arguments, constants, x.device, num_warps=tile.num_warps)


@implements("silu_and_mul", "triton", supports=_first_supported)
def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    _gate_and_mul("silu", x, out)


@implements("gelu_and_mul", "triton", supports=_first_supported)
def gelu_and_mul(x: torch.Tensor, approximate: str, out: torch.Tensor) -> None:
    _gate_and_mul(f"gelu_{approximate}", x, out)


def _gate_and_mul(gate: str, x: torch.Tensor, out: torch.Tensor) -> None:
    width = out.shape[-1]
    tile = policy.triton_elementwise(width).taken
    for part in strides.each(x, out):
        arguments = (*part.tensors, *itertools.chain(*part.strides), part.count, part.inner, width)
        constants = {"GATE": gate, "ROWS": tile.rows, "BLOCK": tile.block}
        grid = (ceil_div(part.count, tile.rows), ceil_div(width, tile.block))
        triton_support.launch(_gated, grid, arguments, constants, x.device, num_warps=tile.num_warps)


def _rotary_supports(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *args: Any
) -> Support:
    most = 2 * policy.ROTARY_TILES[-1].block
    if cos_sin.shape[1] > most:
        return no(f"a rotary_dim of {cos_sin.shape[1]}", f"at most {most}")
    return _supported(q)


@implements("rotary", "triton", supports=_rotary_supports)
def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], cos_sin.shape[1] // 2
    tile = policy.triton_rotary(half).taken
    groups = ceil_div(q_heads, tile.rows) + ceil_div(k_heads, tile.rows)
    if tokens * groups * head_dim == 0:
        return
    steps = itertools.chain(*(t.stride()[:2] for t in (q, k, *out)))
    arguments = (q, k, *out, positions, cos_sin, *steps, q_heads, k_heads, head_dim, half, cos_sin.shape[0])
    constants = {"INTERLEAVED": interleaved, "HEADS": tile.rows, "BLOCK": tile.block}
    triton_support.launch(_rotary, (tokens, groups), arguments, constants, q.device, num_warps=tile.num_warps)


def _embedding_supports(ids: torch.Tensor, weight: torch.Tensor | QuantizedWeight, *args: Any) -> Support:
    if isinstance(weight, QuantizedWeight):
        return no(f"a {weight.format} weight", "a float32, float16 or bfloat16 weight")
    return YES


@implements("embedding", "triton", supports=_embedding_supports)
def embedding(ids: torch.Tensor, weight: torch.Tensor, scale: float, out_dtype: torch.dtype, out: torch.Tensor) -> None:
    tokens, width = out.shape
    if tokens * width == 0:
        return
    tile = policy.triton_elementwise(width).taken
    arguments = (ids, weight, out, weight.stride(0), out.stride(0), tokens, weight.shape[0], width, scale)
    constants = {"ROWS": tile.rows, "BLOCK": tile.block}
    grid = (ceil_div(tokens, tile.rows), ceil_div(width, tile.block))
    triton_support.launch(_embedding, grid, arguments, constants, ids.device, num_warps=tile.num_warps)


def configurations() -> Iterator[Configuration]:
    """Every compiled form that the launch policy can choose, for the dtypes that a model has: tests/codegen's list."""
    i32 = "i32"
    for x, add, tile in itertools.product(FLOATS, (False, True), policy.NORM_TILES):
        for weight in dict.fromkeys((x, torch.float32)):
            for one_step in (True, False) if tile is policy.NORM_TILES[-1] else (True,):
                p = pointer(x)
                types: tuple[str, ...] = (p, p, pointer(weight), p, p, *(i32,) * 10, "fp32", "fp32")
                constants: dict[str, Any] = {"ADD": add, "ONE_STEP": one_step, "BLOCK": tile.block}
                yield Configuration(_rms_norm, types, constants, tile.num_warps)
    for x, gate, tile in itertools.product(FLOATS, ("silu", "gelu_tanh", "gelu_none"), policy.ELEMENTWISE_TILES):
        constants = {"GATE": gate, "ROWS": tile.rows, "BLOCK": tile.block}
        yield Configuration(_gated, (pointer(x), pointer(x), *(i32,) * 7), constants, tile.num_warps)
    for x, interleaved, tile in itertools.product(FLOATS, (False, True), policy.ROTARY_TILES):
        types = (*(pointer(x),) * 4, "*i64", "*fp32", *(i32,) * 13)
        constants = {"INTERLEAVED": interleaved, "HEADS": tile.rows, "BLOCK": tile.block}
        yield Configuration(_rotary, types, constants, tile.num_warps)
    for weight, out, tile in itertools.product(FLOATS, FLOATS, policy.ELEMENTWISE_TILES):
        types = ("*i64", pointer(weight), pointer(out), *(i32,) * 5, "fp32")
        yield Configuration(_embedding, types, {"ROWS": tile.rows, "BLOCK": tile.block}, tile.num_warps)
