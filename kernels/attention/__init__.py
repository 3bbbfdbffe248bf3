"""Attention over a paged KV cache: the attention itself, the cache's writes, and the merge of partial results.

The cache is a pool of N pages of page_size slots; a slot holds one token's keys or values for every key head. A
sequence names its pages in order in a row of the page table: its key j lies at offset j % page_size of page
page_table[b, j // page_size].

The checks here read shapes, dtypes, strides and devices, and never an element, which on a GPU would stop the stream.
That query_start rises from 0 to at most T, that sequences fit their rows of the page table, and that the pages named
for visible keys exist is the caller's part; what happens otherwise is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import checks
from ..dispatch import Operation
from .arguments import check_append, check_merge, check_paged, check_scales, checked_scale, pair

__all__ = ["append_kv", "merge_attention", "paged_attention"]

_paged_attention = Operation("paged_attention", __name__)
_append_kv = Operation("append_kv", __name__)
_merge_attention = Operation("merge_attention", __name__)


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention of a ragged batch over paged keys (Kwon et al. 2023, arXiv:2309.06180).

    One operation for prefill, decode, batches that mix them, and tree verification. Sequence b has
    n = query_start[b + 1] - query_start[b] queries and seq_lens[b] keys, those of its queries included. Its query i
    stands at position seq_lens[b] - n + i and its key j at position j: the last query is aligned with the last key.

    The logit of a visible key is softcap(scale * q . k) - slope * |query position - key position|. A key that is not
    visible takes no part, whatever its slot holds, and slots and page-table entries past those of the visible keys are
    not read. A NaN stays within its own sequence.

    Args:
        q: [T, num_q_heads, D] float32, float16 or bfloat16. Query head h reads key head
            h // (num_q_heads / num_kv_heads).
        k_pages: [N, page_size, num_kv_heads, D] float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8, in any
            combination with q's dtype; any strides with a contiguous last dimension; page_size from 1.
        v_pages: [N, page_size, num_kv_heads, Dv] of the same dtype; may be a view of k_pages (absorbed MLA).
        page_table: [B, M] int32, rows contiguous.
        seq_lens: [B] int32, keys visible to each sequence's last query; at most M * page_size.
        query_start: [B + 1] int32, prefix sum of the query lengths, which may be 0. Rows of q from query_start[B] on
            belong to no sequence and are empty.
        scale: multiplies q . k; 1 / sqrt(D) by default.
        causal: a query sees no key behind its own position.
        window: W or (left, right). The query at p sees keys p - left + 1 .. p + right: `left` counts the token itself,
            as a model's `sliding_window` does, `right` does not. None is unlimited; W is (W, None).
        softcap: s becomes softcap * tanh(s / softcap), before ALiBi and masks (Gemma 2, arXiv:2408.00118).
        alibi_slopes: [num_q_heads] float32 (Press et al. 2021, arXiv:2108.12409).
        sinks: [num_q_heads] float32, for each head the logit of one more key that every row sees and whose value is
            zero (Xiao et al. 2023, arXiv:2309.17453, in the form of gpt-oss); -inf for none.
        k_scale: what stored fp8 or int8 keys are multiplied by: a number; a float32 tensor with one element; one a key
            head, [num_kv_heads]; or one a slot and head, [N, page_size, num_kv_heads] (per-token-head), any strides. 1
            by default.
        v_scale: likewise for values.
        tree_mask: [T, W] int32, rows contiguous. Bit i % 32 (from the lowest) of word i // 32 in a query's row lets it
            see the key of its sequence's query i: set it for a node's ancestors and for the node itself. The keys
            before the sequence's queries are visible as ever. In windows and ALiBi a node stands at the position
            seq_lens[b] - n + (bits set among its first n) - 1, its key too, so that a path of a tree gives what the
            same tokens give as a sequence. A sequence of more than 32 * W queries is causal, as without a mask, which
            lets prefill share a batch with trees. Needs `causal`.
        return_lse: also return the log-sum-exp of each row's logits, sink included.
        out: like the result, (result, LSE) with `return_lse`; must not overlap the inputs.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        [T, num_q_heads, Dv] of q's dtype, and with `return_lse` also float32 [T, num_q_heads], natural logarithm.
        An empty row, one that sees no key, is 0 and its LSE -inf (with `sinks`, the sink).

    Raises:
        ValueError: a dtype, shape, stride or device is not as above, num_q_heads is no multiple of num_kv_heads, or a
            window, softcap or scale makes no sense.
        UnsupportedError: no backend supports the request.
    """
    window = pair(window)
    check_paged(q, k_pages, v_pages, page_table, seq_lens, query_start, alibi_slopes, sinks, tree_mask, causal)
    check_scales(k_pages, k_scale, v_scale)
    scale = checked_scale(q.shape[2], scale, softcap)
    shape, lse_shape = (*q.shape[:2], v_pages.shape[3]), q.shape[:2]
    if out is not None:
        result, lse = out if isinstance(out, tuple) else (out, None)
        if return_lse != (lse is not None):
            raise ValueError(
                f"out is a {type(out).__name__}; with return_lse={return_lse} it should be "
                f"{'a pair (result, LSE)' if return_lse else 'one tensor'}"
            )
        checks.output("out", result, shape, q.dtype, q.device)
        if lse is not None:
            checks.output("out[1]", lse, lse_shape, torch.float32, q.device)
    args = (
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        query_start,
        scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        tree_mask,
        return_lse,
    )
    run = _paged_attention.select(q.device, backend, *args)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
        if return_lse:
            out = (out, torch.empty(lse_shape, dtype=torch.float32, device=q.device))
    run(*args, out)
    return out


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Writes tokens' keys and values into their slots of the pages, quantising where the pages are fp8 or int8.

    Pages of float32, float16 and bfloat16 take the numbers rounded to nearest even. fp8 and int8 pages take x / scale,
    divided in float32 and rounded to nearest even; what is too large, infinities too, becomes the largest number of
    its sign (448, 57344, 127), a scale of 0 gives 0, and NaN stays NaN in fp8 and becomes 0 in int8. With a scale for
    each slot and head, the scales are written too: max |x| over the finite x of the row, divided in float32 by that
    largest number; 0 where that is below the smallest normal float32; NaN for an int8 row that has one.

    Args:
        k: [T, num_kv_heads, D] float32, float16 or bfloat16; any strides with a contiguous last dimension.
        v: [T, num_kv_heads, Dv] of k's dtype; None, with v_pages None, where values are a view of the keys.
        k_pages: [N, page_size, num_kv_heads, D] of a dtype that `paged_attention` takes. Written.
        v_pages: [N, page_size, num_kv_heads, Dv] of the same dtype. Written.
        slots: [T] int64 or int32, page * page_size + offset of each token; one that is negative or not in the pages
            writes nothing. Two tokens must not share one.
        k_scale: as in `paged_attention`. One a slot and head is written.
        v_scale: likewise.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    check_append(k, v, k_pages, v_pages, slots)
    check_scales(k_pages, k_scale, v_scale)
    args = (k, v, k_pages, v_pages, slots, k_scale, v_scale)
    _append_kv.select(k.device, backend, *args)(*args, None)


def merge_attention(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over disjoint sets of keys into attention over all of them.

    sum_i exp(lse_i) out_i / sum_i exp(lse_i): shared-prefix (cascade) attention is two calls and a merge. With sinks,
    give them to one of the calls alone.

    Args:
        outs: S >= 1 tensors [T, num_heads, Dv] float32, float16 or bfloat16, or one [S, T, num_heads, Dv]. Where a
            part's LSE is -inf its row is ignored, whatever it holds.
        lses: S tensors [T, num_heads] float32, or one [S, T, num_heads]; natural logarithms.
        out: (like the result, like the LSE); must not overlap the inputs.
        backend: forces one of `kernels.dispatch.BACKENDS`.

    Returns:
        ([T, num_heads, Dv] of the dtype of outs, float32 [T, num_heads]); 0 and -inf where every LSE is -inf, and
        exactly the part's own where all others are.

    Raises:
        ValueError: a dtype, shape, stride or device is not as above.
        UnsupportedError: no backend supports the request.
    """
    outs, lses = tuple(outs), tuple(lses)
    check_merge(outs, lses)
    if out is not None:
        checks.output("out[0]", out[0], outs[0].shape, outs[0].dtype, outs[0].device)
        checks.output("out[1]", out[1], lses[0].shape, torch.float32, outs[0].device)
    run = _merge_attention.select(outs[0].device, backend, outs, lses)
    if out is None:
        out = (
            torch.empty_like(outs[0], memory_format=torch.contiguous_format),
            torch.empty_like(lses[0], memory_format=torch.contiguous_format),
        )
    run(outs, lses, out)
    return out
