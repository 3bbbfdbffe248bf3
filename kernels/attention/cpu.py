"""Attention on the CPU: hands addresses and strides to csrc/cpu/attention.cpp and csrc/cpu/kv_cache.cpp."""

from __future__ import annotations

from typing import Any

import torch

from .. import _cpu
from ..dispatch import implements
from ..dtypes import CODES

Scale = float | torch.Tensor | None
ScaleNumbers = tuple[
    float, int, int, int, int
]  # a number; the address of others, and their page, slot and head strides
_UNSCALED: ScaleNumbers = (1.0, 0, 0, 0, 0)


def _scale_numbers(scale: Scale) -> ScaleNumbers:
    if scale is None:
        return _UNSCALED
    if not isinstance(scale, torch.Tensor):
        return (scale, 0, 0, 0, 0)
    if scale.dim() == 3:
        page, slot, head = scale.stride()
        return (1.0, scale.data_ptr(), page, slot, head)
    return (1.0, scale.data_ptr(), 0, 0, scale.stride(0) if scale.numel() > 1 else 0)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@implements("paged_attention", "cpu")
def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: Scale,
    v_scale: Scale,
    tree_mask: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> None:
    result, lse = out if isinstance(out, tuple) else (out, None)
    left, right = (None, None) if window is None else window
    tokens, num_q_heads, dim = q.shape
    _, page_size, num_kv_heads, value_dim = v_pages.shape
    _cpu.paged_attention(
        tokens,
        num_q_heads,
        num_kv_heads,
        page_table.shape[0],
        page_size,
        dim,
        value_dim,
        CODES[q.dtype],
        CODES[k_pages.dtype],
        q.data_ptr(),
        *q.stride()[:2],
        k_pages.data_ptr(),
        *k_pages.stride()[:3],
        v_pages.data_ptr(),
        *v_pages.stride()[:3],
        *_scale_numbers(k_scale),
        *_scale_numbers(v_scale),
        page_table.data_ptr(),
        page_table.stride()[0],
        seq_lens.data_ptr(),
        query_start.data_ptr(),
        scale,
        0.0 if softcap is None else softcap,
        causal,
        -1 if left is None else left,
        -1 if right is None else right,
        _address(alibi_slopes),
        _address(sinks),
        *((0, 0, 0) if tree_mask is None else (tree_mask.data_ptr(), tree_mask.stride()[0], tree_mask.shape[1])),
        result.data_ptr(),
        *result.stride()[:2],
        *((0, 0) if lse is None else (lse.data_ptr(), lse.stride()[0])),
    )


@implements("append_kv", "cpu")
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    out: None,
) -> None:
    num_pages, page_size, heads, _ = k_pages.shape
    _cpu.append_kv(
        k.shape[0],
        heads,
        num_pages,
        page_size,
        slots.data_ptr(),
        slots.dtype == torch.int64,
        *_append_rows(k, k_pages, k_scale),
        *_append_rows(v, v_pages, v_scale),
        CODES[k.dtype],
        CODES[k_pages.dtype],
    )


def _append_rows(rows: torch.Tensor | None, pages: torch.Tensor | None, scale: Scale) -> tuple[Any, ...]:
    """What the native module wants to know of keys or values: rows, pages, scales, whether the scales are written."""
    if rows is None or pages is None:
        return (0, 0, 0), (0, 0, 0, 0, 0), _UNSCALED, False
    written = isinstance(scale, torch.Tensor) and scale.dim() == 3
    where = (pages.data_ptr(), *pages.stride()[:3], pages.shape[3])
    return (rows.data_ptr(), *rows.stride()[:2]), where, _scale_numbers(scale), written


@implements("merge_attention", "cpu")
def merge_attention(
    outs: tuple[torch.Tensor, ...], lses: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, torch.Tensor]
) -> None:
    parts = [_part(*pair) for pair in zip(outs, lses, strict=True)]
    _cpu.merge_attention(*out[0].shape, parts, _part(*out), CODES[out[0].dtype])


def _part(out: torch.Tensor, lse: torch.Tensor) -> tuple[int, int, int, int, int]:
    token, head, _ = out.stride()
    return (out.data_ptr(), token, head, lse.data_ptr(), lse.stride()[0])
