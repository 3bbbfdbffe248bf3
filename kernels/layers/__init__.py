"""The small operations between the matrix products: norms, rotary embedding, gated activations, token embedding.

All of them are bound by memory: each element is read and written once. Arithmetic is float32 whatever the tensors'
dtype, and is rounded once, when the result is stored. A row's result does not depend on other rows, so a NaN stays in
its row and the batch does not matter, bit for bit. On `cuda` the order of a norm's sum does depend on whether all rows
are aligned for 16-byte accesses, so the last bit of a strided tensor's norm may differ from that of its copy.
"""

from __future__ import annotations

import torch

from .. import checks
from ..dispatch import Operation
from ..dtypes import FLOATS
from ..quantized import QuantizedWeight

__all__ = ["embedding", "fused_add_rms_norm", "gelu_and_mul", "rms_norm", "rotary", "silu_and_mul"]

_rms_norm = Operation("rms_norm", __name__)
_fused_add_rms_norm = Operation("fused_add_rms_norm", __name__)
_rotary = Operation("rotary", __name__)
_silu_and_mul = Operation("silu_and_mul", __name__)
_gelu_and_mul = Operation("gelu_and_mul", __name__)
_embedding = Operation("embedding", __name__)

INDICES = (torch.int64, torch.int32)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), row by row (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [..., D] float32, float16 or bfloat16; any strides with a contiguous last dimension.
        weight: [D] contiguous, any of these dtypes.
        eps: added to the mean square; not negative.
        weight_offset: added to every weight: 1 for checkpoints that store weights around zero.
        out: like the result; may be x itself, but not overlap it otherwise.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [..., D] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    shape, dtype, device = x.shape, x.dtype, x.device
    _check_norm(x, weight, eps, shape, dtype, device)
    if out is not None:
        checks.output("out", out, shape, dtype, device)
    args = (x, weight, eps, weight_offset)
    run = _rms_norm.select(device, backend, *args)
    if out is None:
        out = torch.empty_like(x)
    run(*args, out)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a sublayer's output to the residual stream and normalises the sum, in one pass.

    The norm is of the sum before it is rounded to the residual's dtype.

    Args:
        x: [..., D] float32, float16 or bfloat16, the sublayer's output.
        residual: like x, the residual stream.
        weight: [D] contiguous, any of these dtypes.
        eps: added to the mean square; not negative.
        weight_offset: added to every weight.
        out: (normed, sum), both like x; may be (x, residual), but not overlap them otherwise.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        (rms_norm(x + residual), x + residual), both [..., D] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    shape, dtype, device = x.shape, x.dtype, x.device
    _check_norm(x, weight, eps, shape, dtype, device)
    if residual.shape != shape or residual.dtype != dtype or residual.device != device or residual.stride()[-1] != 1:
        checks.dtype("residual", residual, (dtype,))
        checks.shape("residual", residual, shape, "that of x")
        checks.contiguous_rows("residual", residual)
        checks.same_device("residual", residual, "x", x)
    if out is not None:
        checks.output("out[0]", out[0], shape, dtype, device)
        checks.output("out[1]", out[1], shape, dtype, device)
    args = (x, residual, weight, eps, weight_offset)
    run = _fused_add_rms_norm.select(device, backend, *args)
    if out is None:
        out = (torch.empty_like(x), torch.empty_like(x))
    run(*args, out)
    return out


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns pairs of each head's dimensions by an angle that grows with the token's position (RoPE, arXiv:2104.09864).

    Only the first rotary_dim dimensions turn; the rest are copied. `kernels.layers.rope` makes the table, with linear,
    Llama-3 and YaRN scaling.

    Args:
        q: [T, num_q_heads, head_dim] float32, float16 or bfloat16; any strides with a contiguous last dimension.
        k: [T, num_kv_heads, head_dim] of q's dtype.
        positions: [T] int64 or int32. A position outside the table turns into NaN, and nothing is read for it.
        cos_sin: [max_position, rotary_dim] float32 contiguous, a row's cosines and then its sines.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ... (NeoX).
        out: (like q, like k); may be (q, k), but not overlap them otherwise.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        (q turned, k turned).

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    _check_rotary(q, k, positions, cos_sin)
    if out is not None:
        for i, x in enumerate((q, k)):
            if out[i] is not x:
                checks.output(f"out[{i}]", out[i], x.shape, x.dtype, x.device)
    args = (q, k, positions, cos_sin, interleaved)
    run = _rotary.select(q.device, backend, *args)
    if out is None:
        out = (torch.empty_like(q), torch.empty_like(k))
    run(*args, out)
    return out


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None) -> torch.Tensor:
    """silu(gate) * up, the gated activation of SwiGLU (Shazeer 2020, arXiv:2002.05202).

    Args:
        x: [..., 2 F] float32, float16 or bfloat16, the gate's F values and then the up projection's; any strides with
            a contiguous last dimension.
        out: like the result; must not overlap x.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [..., F] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    shape = _check_gated(x, out)
    run = _silu_and_mul.select(x.device, backend, x)
    if out is None:
        out = x.new_empty(shape)
    run(x, out)
    return out


def gelu_and_mul(
    x: torch.Tensor,
    *,
    approximate: str = "tanh",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """gelu(gate) * up, the gated activation of GeGLU (Shazeer 2020, arXiv:2002.05202).

    Args:
        x: [..., 2 F] float32, float16 or bfloat16, the gate's F values and then the up projection's; any strides with
            a contiguous last dimension.
        approximate: "tanh" for the tanh form, "none" for the exact one with the normal distribution function.
        out: like the result; must not overlap x.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [..., F] of x's dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above, or another value of `approximate`.
        UnsupportedError: no backend supports the request.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate is {approximate!r}; it should be 'tanh' or 'none'")
    shape = _check_gated(x, out)
    args = (x, approximate)
    run = _gelu_and_mul.select(x.device, backend, *args)
    if out is None:
        out = x.new_empty(shape)
    run(*args, out)
    return out


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    *,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Looks up a row of `weight` for each token, decoding a quantised one on the way.

    Args:
        ids: [T] int64 or int32, contiguous. An id outside 0 .. V - 1 gives a row of zeros, and nothing is read for it.
        weight: [V, D] float32, float16 or bfloat16 with contiguous rows, or a `QuantizedWeight` of shape (V, D).
        scale: multiplies every element (Gemma's sqrt(D)).
        out_dtype: of the result; by default the weight's, and float32 for a quantised weight.
        out: like the result.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [T, D] of out_dtype.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    checks.dtype("ids", ids, INDICES)
    checks.rank("ids", ids, 1, "[T]")
    checks.contiguous_rows("ids", ids)
    if isinstance(weight, torch.Tensor):
        checks.dtype("weight", weight, FLOATS)
        checks.rank("weight", weight, 2, "[V, D]")
        checks.contiguous_rows("weight", weight)
    if weight.device != ids.device:
        raise ValueError(f"weight is on {weight.device} and ids on {ids.device}; they should be on one device")
    if out_dtype is None:
        out_dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.float32
    elif out_dtype not in FLOATS:
        raise ValueError(f"out_dtype is {out_dtype}; it should be float32, float16 or bfloat16")
    shape = (ids.shape[0], weight.shape[1])
    if out is not None:
        checks.output("out", out, shape, out_dtype, ids.device)
    args = (ids, weight, scale, out_dtype)
    run = _embedding.select(ids.device, backend, *args)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=ids.device)
    run(*args, out)
    return out


def _check_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if (
        shape
        and dtype in FLOATS
        and (x.is_contiguous() or x.stride()[-1] == 1)
        and weight.shape == (shape[-1],)
        and weight.dtype in FLOATS
        and weight.is_contiguous()
        and weight.device == device
        and eps >= 0
    ):
        return
    checks.dtype("x", x, FLOATS)
    if not shape:
        raise ValueError("x has no dimensions; it should be [..., D]")
    checks.contiguous_rows("x", x)
    checks.dtype("weight", weight, FLOATS)
    checks.shape("weight", weight, shape[-1:], "D, the last dimension of x")
    checks.contiguous_rows("weight", weight)
    checks.same_device("weight", weight, "x", x)
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; it should not be negative")


def _check_rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    device, dtype = q.device, q.dtype
    if (
        q.dim() == k.dim() == 3
        and dtype in FLOATS
        and k.dtype == dtype
        and positions.dtype in INDICES
        and cos_sin.dtype == torch.float32
        and q.stride()[2] == 1
        and k.stride()[2] == 1
        and positions.stride() == (1,)
        and cos_sin.is_contiguous()
        and k.device == device
        and positions.device == device
        and cos_sin.device == device
        and _rotary_shapes_fit(q.shape, k.shape, positions.shape, cos_sin.shape)
    ):
        return
    checks.dtype("q", q, FLOATS)
    checks.rank("q", q, 3, "[T, num_q_heads, head_dim]")
    checks.contiguous_rows("q", q)
    checks.dtype("k", k, (dtype,))
    checks.rank("k", k, 3, "[T, num_kv_heads, head_dim]")
    checks.shape("k", k, (q.shape[0], k.shape[1], q.shape[2]), "T and head_dim are those of q")
    checks.contiguous_rows("k", k)
    checks.dtype("positions", positions, INDICES)
    checks.shape("positions", positions, q.shape[:1], "T, one a token")
    checks.contiguous_rows("positions", positions)
    checks.dtype("cos_sin", cos_sin, (torch.float32,))
    checks.rank("cos_sin", cos_sin, 2, "[max_position, rotary_dim]")
    if not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin has strides {list(cos_sin.stride())}; it should be contiguous")
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or rotary_dim > q.shape[2]:
        raise ValueError(
            f"cos_sin has shape {list(cos_sin.shape)}; rotary_dim should be even and at most head_dim = {q.shape[2]}"
        )
    for name, tensor in (("k", k), ("positions", positions), ("cos_sin", cos_sin)):
        checks.same_device(name, tensor, "q", q)


def _rotary_shapes_fit(
    q: tuple[int, ...], k: tuple[int, ...], positions: tuple[int, ...], cos_sin: tuple[int, ...]
) -> bool:
    tokens, _, head_dim = q
    return (
        k[0] == tokens
        and k[2] == head_dim
        and positions == (tokens,)
        and len(cos_sin) == 2
        and cos_sin[1] % 2 == 0
        and cos_sin[1] <= head_dim
    )


def _check_gated(x: torch.Tensor, out: torch.Tensor | None) -> tuple[int, ...]:
    shape, dtype = x.shape, x.dtype
    if not (shape and shape[-1] % 2 == 0 and dtype in FLOATS and (x.is_contiguous() or x.stride()[-1] == 1)):
        checks.dtype("x", x, FLOATS)
        if not shape or shape[-1] % 2:
            raise ValueError(
                f"x has shape {list(shape)}; its last dimension should be even: F of the gate, then F of up"
            )
        checks.contiguous_rows("x", x)
    result = (*shape[:-1], shape[-1] // 2)
    if out is not None:
        checks.output("out", out, result, dtype, x.device)
    return result
