"""The layers in CUDA (csrc/cuda/layers), for sm_80 and newer; on host tensors in the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import strides
from ..cuda_launch import launch, supported
from ..dispatch import Support, implements, no
from ..quantized import QuantizedWeight
from . import policy

SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
MAX_ROWS = 2**31 - 1
_GELU = {"tanh": "gelu_tanh", "none": "gelu_none"}


class _Strides(ctypes.Structure):
    _fields_ = [("outer", ctypes.c_int64), ("inner", ctypes.c_int64)]


class _RmsNorm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out", "sum")),
        *((name, _Strides) for name in ("x_strides", "residual_strides", "out_strides", "sum_strides")),
        ("rows", ctypes.c_uint32),
        ("inner_rows", ctypes.c_uint32),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
    ]


class _Gated(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, _Strides) for name in ("x_strides", "out_strides")),
        ("rows", ctypes.c_uint32),
        ("inner_rows", ctypes.c_uint32),
        ("width", ctypes.c_int32),
    ]


class _Rotary(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "q_out", "k_out", "positions", "cos_sin")),
        *((name, _Strides) for name in ("q_strides", "k_strides", "q_out_strides", "k_out_strides")),
        ("max_position", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("narrow_positions", "q_heads", "k_heads", "head_dim", "half")),
    ]


class _Embedding(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("vocabulary", "weight_stride", "out_stride")),
        ("tokens", ctypes.c_uint32),
        ("width", ctypes.c_int32),
        ("narrow_ids", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


def _supported(tensor: torch.Tensor, rows_in_all: int) -> Support:
    if rows_in_all > MAX_ROWS:
        return no(f"{rows_in_all} rows", f"at most {MAX_ROWS}")
    return supported(tensor.device)


def _rows_supported(x: torch.Tensor) -> Support:
    return _supported(x, x.numel() // max(1, x.shape[-1]))


def _norm_supports(x: torch.Tensor, *args: Any) -> Support:
    weight = args[-3]
    if weight.dtype not in (x.dtype, torch.float32):
        return no(f"a {weight.dtype} weight for a {x.dtype} x", "a weight of x's dtype or float32")
    return _rows_supported(x)


@implements("rms_norm", "cuda", supports=_norm_supports)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, out: torch.Tensor) -> None:
    _norm("rms_norm", (x, out), weight, eps, weight_offset)


@implements("fused_add_rms_norm", "cuda", supports=_norm_supports)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    _norm("fused_add_rms_norm", (x, out[0], residual, out[1]), weight, eps, weight_offset)


def _norm(
    kernel: str, tensors: tuple[torch.Tensor, ...], weight: torch.Tensor, eps: float, weight_offset: float
) -> None:
    """`tensors` are x and out, and with a residual then the residual and the sum."""
    x = tensors[0]
    width = x.shape[-1]
    sizes = (x.element_size(), weight.element_size())
    pack = policy.ACCESS // min(sizes)  # that a thread owns, however it is read: the order of the sum
    elements = policy.pack(sizes, (width,), strides.aligned((*tensors, weight), pack)).taken
    for part in strides.each(*tensors):
        addresses = [t.data_ptr() for t in part.tensors] + [0, 0]
        steps = [_Strides(*s) for s in part.strides] + [_Strides(), _Strides()]
        params = _RmsNorm(
            x=addresses[0],
            out=addresses[1],
            residual=addresses[2],
            sum=addresses[3],
            weight=weight.data_ptr(),
            x_strides=steps[0],
            out_strides=steps[1],
            residual_strides=steps[2],
            sum_strides=steps[3],
            rows=part.count,
            inner_rows=part.inner,
            width=width,
            eps=eps,
            weight_offset=weight_offset,
        )
        name = f"{kernel}_{SHORT[x.dtype]}_{SHORT[weight.dtype]}_x{elements}"
        launch(name, policy.norm(part.count, width, pack), params, x.device)


def _gated_supports(x: torch.Tensor, *args: Any) -> Support:
    return _rows_supported(x)


@implements("silu_and_mul", "cuda", supports=_gated_supports)
def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    _gated("silu", x, out)


@implements("gelu_and_mul", "cuda", supports=_gated_supports)
def gelu_and_mul(x: torch.Tensor, approximate: str, out: torch.Tensor) -> None:
    _gated(_GELU[approximate], x, out)


def _gated(activation: str, x: torch.Tensor, out: torch.Tensor) -> None:
    width = out.shape[-1]
    is_aligned = strides.aligned((x, out), policy.ACCESS // x.element_size())
    elements = policy.pack((x.element_size(),), (width,), is_aligned).taken
    for part in strides.each(x, out):
        steps = [_Strides(*s) for s in part.strides]
        addresses = [t.data_ptr() for t in part.tensors]
        params = _Gated(*addresses, *steps, part.count, part.inner, width)
        name = f"{activation}_and_mul_{SHORT[x.dtype]}_x{elements}"
        launch(name, policy.elementwise(part.count, width, elements), params, x.device)


def _rotary_supports(q: torch.Tensor, k: torch.Tensor, *args: Any) -> Support:
    return _supported(q, q.shape[0])


@implements("rotary", "cuda", supports=_rotary_supports)
def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    tokens, q_heads, head_dim = q.shape
    heads, half = q_heads + k.shape[1], cos_sin.shape[1] // 2
    if tokens * heads * head_dim == 0:
        return
    packed = policy.ACCESS // q.element_size()
    is_aligned = strides.aligned((q, k, *out), packed) and strides.aligned((cos_sin,), 4)
    elements = policy.pack((q.element_size(),), (half, head_dim - 2 * half), is_aligned).taken
    params = _Rotary(
        *(t.data_ptr() for t in (q, k, *out, positions, cos_sin)),
        *(_Strides(*t.stride()[:2]) for t in (q, k, *out)),
        cos_sin.shape[0],
        positions.dtype == torch.int32,
        q_heads,
        k.shape[1],
        head_dim,
        half,
    )
    pairing = "interleaved" if interleaved else "halves"
    geometry = policy.rotary(tokens, heads, head_dim, half, elements)
    launch(f"rotary_{pairing}_{SHORT[q.dtype]}_x{elements}", geometry, params, q.device)


def _embedding_supports(ids: torch.Tensor, weight: torch.Tensor | QuantizedWeight, *args: Any) -> Support:
    if isinstance(weight, QuantizedWeight):
        return no(f"a {weight.format} weight", "a float32, float16 or bfloat16 weight")
    return _supported(ids, ids.shape[0])


@implements("embedding", "cuda", supports=_embedding_supports)
def embedding(ids: torch.Tensor, weight: torch.Tensor, scale: float, out_dtype: torch.dtype, out: torch.Tensor) -> None:
    tokens, width = out.shape
    if tokens * width == 0:
        return
    sizes = (weight.element_size(), out.element_size())
    is_aligned = strides.aligned((weight, out), policy.ACCESS // min(sizes))
    elements = policy.pack(sizes, (width,), is_aligned).taken
    params = _Embedding(
        *(t.data_ptr() for t in (ids, weight, out)),
        weight.shape[0],
        weight.stride(0),
        out.stride(0),
        tokens,
        width,
        ids.dtype == torch.int32,
        scale,
    )
    name = f"embedding_{SHORT[weight.dtype]}_{SHORT[out_dtype]}_x{elements}"
    launch(name, policy.elementwise(tokens, width, elements), params, ids.device)
