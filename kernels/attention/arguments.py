"""The checks of attention's arguments: everything that shapes, dtypes, strides and devices can tell."""

from __future__ import annotations

import math

import torch

from .. import checks
from ..dtypes import FLOATS, names

PAGES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
QUANTIZED = PAGES[3:]


def pair(window: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None] | None:
    """The window as (left, right), None where neither side is limited."""
    if window is None:
        return None
    left, right = window if isinstance(window, tuple) else (window, None)
    for side, least, meaning in (
        (left, 1, "left should be at least 1, the token itself, or None"),
        (right, 0, "right should be at least 0, or None"),
    ):
        if side is not None and (not isinstance(side, int) or side < least):
            raise ValueError(f"window is {window!r}; {meaning}")
    return None if left is None and right is None else (left, right)


def checked_scale(head_dim: int, scale: float | None, softcap: float | None) -> float:
    """The scale of the scores; `scale` and `softcap` are numbers that make sense."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it should be positive and finite, or None for no cap")
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it should be finite")
    return float(scale)


def check_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    causal: bool,
) -> None:
    """The tensors of `paged_attention` except the scales."""
    if (
        alibi_slopes is None
        and sinks is None
        and tree_mask is None
        and _plain(q, k_pages, v_pages, page_table, seq_lens, query_start)
    ):
        return
    checks.dtype("q", q, FLOATS)
    checks.rank("q", q, 3, "[T, num_q_heads, D]")
    checks.contiguous_rows("q", q)
    _check_pages(k_pages, v_pages)
    num_q_heads, num_kv_heads = q.shape[1], k_pages.shape[2]
    if k_pages.shape[3] != q.shape[2]:
        raise ValueError(f"k_pages has shape {list(k_pages.shape)}; its last dimension should be q's D = {q.shape[2]}")
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_q_heads} heads; their number should be a positive multiple of the {num_kv_heads} heads of "
            "k_pages"
        )
    _check_int32("page_table", page_table, 2, "[B, M]")
    _check_int32("seq_lens", seq_lens, 1, "[B]")
    checks.shape("seq_lens", seq_lens, page_table.shape[:1], "B, the rows of page_table")
    _check_int32("query_start", query_start, 1, "[B + 1]")
    checks.shape("query_start", query_start, (page_table.shape[0] + 1,), "B + 1, B the rows of page_table")
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            checks.dtype(name, per_head, (torch.float32,))
            checks.shape(name, per_head, (num_q_heads,), "num_q_heads")
            checks.contiguous_rows(name, per_head)
            checks.same_device(name, per_head, "q", q)
    if tree_mask is not None:
        _check_int32("tree_mask", tree_mask, 2, "[T, W]")
        checks.shape("tree_mask", tree_mask, (q.shape[0], tree_mask.shape[1]), "T, the rows of q, by W")
        checks.same_device("tree_mask", tree_mask, "q", q)
        if not causal:
            raise ValueError("causal is False; with a tree_mask it should be True")
    checks.same_device("k_pages", k_pages, "q", q)
    checks.same_device("v_pages", v_pages, "q", q)
    checks.same_device("page_table", page_table, "q", q)
    checks.same_device("seq_lens", seq_lens, "q", q)
    checks.same_device("query_start", query_start, "q", q)


def _plain(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
) -> bool:
    """Whether everything is as `check_paged` wants it, at a tenth of its price; False where it may still be."""
    q_shape, k_shape, v_shape, table_shape = q.shape, k_pages.shape, v_pages.shape, page_table.shape
    device, pages = q.device, k_pages.dtype
    return (
        q.dtype in FLOATS
        and pages in PAGES
        and v_pages.dtype == pages
        and page_table.dtype == seq_lens.dtype == query_start.dtype == torch.int32
        and len(q_shape) == 3
        and len(k_shape) == len(v_shape) == 4
        and len(table_shape) == 2
        and k_shape[3] == q_shape[2]
        and k_shape[:3] == v_shape[:3]
        and 0 not in (*k_shape[1:], v_shape[3], q_shape[1])
        and q_shape[1] % k_shape[2] == 0
        and seq_lens.shape == table_shape[:1]
        and query_start.shape == (table_shape[0] + 1,)
        and all(t.is_contiguous() for t in (q, k_pages, v_pages, page_table, seq_lens, query_start))
        and all(t.device == device for t in (k_pages, v_pages, page_table, seq_lens, query_start))
    )


def check_scales(
    k_pages: torch.Tensor, k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None
) -> None:
    """The scales of quantised pages."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_pages.dtype not in QUANTIZED:
            raise ValueError(
                f"{name} is given and k_pages is {names((k_pages.dtype,))}; only fp8 and int8 pages "
                "have scales, so it should be None"
            )
        if not isinstance(scale, torch.Tensor):
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{name} is {scale}; it should be positive and finite")
            continue
        checks.dtype(name, scale, (torch.float32,))
        per_head = (k_pages.shape[2],)
        if scale.shape not in ((), (1,), per_head, k_pages.shape[:3]):
            raise ValueError(
                f"{name} has shape {list(scale.shape)}; it should be one number, [num_kv_heads] = {list(per_head)}, or "
                f"[N, page_size, num_kv_heads] = {list(k_pages.shape[:3])}"
            )
        checks.same_device(name, scale, "k_pages", k_pages)


def check_append(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """The tensors of `append_kv` except the scales."""
    if (v is None) != (v_pages is None):
        given, missing = ("v_pages", "v") if v is None else ("v", "v_pages")
        raise ValueError(f"{missing} is None and {given} is not; they should be given together")
    _check_pages(k_pages, k_pages if v_pages is None else v_pages)
    checks.dtype("k", k, FLOATS)
    checks.rank("k", k, 3, "[T, num_kv_heads, D]")
    checks.dtype("slots", slots, (torch.int64, torch.int32))
    checks.shape("slots", slots, k.shape[:1], "T, one a token")
    checks.contiguous_rows("slots", slots)
    checks.same_device("slots", slots, "k", k)
    for name, rows, pages in (("k", k, k_pages), ("v", v, v_pages)):
        if rows is None or pages is None:
            continue
        checks.dtype(name, rows, (k.dtype,))
        checks.shape(name, rows, (k.shape[0], *pages.shape[2:]), f"T, and heads and dimension of {name}_pages")
        checks.contiguous_rows(name, rows)
        checks.same_device(name, rows, "k", k)
        checks.same_device(f"{name}_pages", pages, "k", k)


def check_merge(outs: tuple[torch.Tensor, ...], lses: tuple[torch.Tensor, ...]) -> None:
    """The tensors of `merge_attention`."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}; they should have as many, at least one")
    first = outs[0]
    checks.dtype("outs[0]", first, FLOATS)
    checks.rank("outs[0]", first, 3, "[T, num_heads, Dv]")
    for i, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        checks.dtype(f"outs[{i}]", part, (first.dtype,))
        checks.shape(f"outs[{i}]", part, first.shape, "that of outs[0]")
        checks.contiguous_rows(f"outs[{i}]", part)
        checks.same_device(f"outs[{i}]", part, "outs[0]", first)
        checks.dtype(f"lses[{i}]", lse, (torch.float32,))
        checks.shape(f"lses[{i}]", lse, first.shape[:2], "T and num_heads of outs")
        checks.contiguous_rows(f"lses[{i}]", lse)
        checks.same_device(f"lses[{i}]", lse, "outs[0]", first)


def _check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    checks.dtype("k_pages", k_pages, PAGES)
    checks.rank("k_pages", k_pages, 4, "[N, page_size, num_kv_heads, D]")
    if 0 in k_pages.shape[1:]:
        raise ValueError(f"k_pages has shape {list(k_pages.shape)}; page_size, num_kv_heads and D should be positive")
    checks.contiguous_rows("k_pages", k_pages)
    checks.dtype("v_pages", v_pages, (k_pages.dtype,))
    checks.rank("v_pages", v_pages, 4, "[N, page_size, num_kv_heads, Dv]")
    checks.shape("v_pages", v_pages, (*k_pages.shape[:3], v_pages.shape[3]), "as k_pages up to Dv")
    if v_pages.shape[3] == 0:
        raise ValueError(f"v_pages has shape {list(v_pages.shape)}; Dv should be positive")
    checks.contiguous_rows("v_pages", v_pages)


def _check_int32(name: str, tensor: torch.Tensor, dims: int, meaning: str) -> None:
    checks.dtype(name, tensor, (torch.int32,))
    checks.rank(name, tensor, dims, meaning)
    checks.contiguous_rows(name, tensor)
