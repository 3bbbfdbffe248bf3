"""Attention over a paged KV cache, the cache's writes, and the merge of partial results, all in float64.

A sequence is computed alone, from shapes that are its own, so the rows beside it in the batch, its place there and the
places of its pages in the pool change nothing, bit for bit. Cutting a prompt into other chunks changes the shapes of
the float64 products and with them, perhaps, their last bits: rounded once to float32, a result then differs with a
chance of about 1e-8 an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Window = int | tuple[int | None, int | None] | None

_SCORES_AT_ONCE = 1 << 22  # float64 scores held at a time: query rows are taken in blocks of so many


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(softcap(scale q k^T) - slope |distance|)) v for each query of each sequence.

    Sequence b has the n queries query_start[b] .. query_start[b + 1] - 1 and seq_lens[b] keys; its query i stands at
    position seq_lens[b] - n + i, its key j at position j. See `kernels.attention.paged_attention` for the arguments.

    Args:
        q: [T, num_q_heads, D].
        k_pages: [N, page_size, num_kv_heads, D].
        v_pages: [N, page_size, num_kv_heads, Dv].
        page_table: [B, M], the pages of each sequence in order.
        seq_lens: [B].
        query_start: [B + 1].
        scale: of the scores; 1 / sqrt(D) when None.
        causal: a query sees no key behind its own position.
        window: `left` or (left, right): the query at p sees the keys p - left + 1 .. p + right.
        softcap: scores become softcap * tanh(score / softcap).
        alibi_slopes: [num_q_heads].
        sinks: [num_q_heads], the score of one more key, whose value is zero.
        k_scale: multiplies keys: a number, [num_kv_heads], or [N, page_size, num_kv_heads].
        v_scale: multiplies values, likewise.
        tree_mask: [T, W] packed bits: bit i of a query's row lets it see the key of its sequence's query i.
        return_lse: also return the logarithm of each row's denominator.

    Returns:
        [T, num_q_heads, Dv] in q's dtype, and with `return_lse` the natural-log LSE, float32 [T, num_q_heads].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    out = q.new_zeros(num_tokens, num_q_heads, v_pages.shape[-1])
    lse = q.new_full((num_tokens, num_q_heads), float("-inf"), dtype=torch.float32)
    rule = _Rule(head_dim**-0.5 if scale is None else scale, causal, window, softcap, alibi_slopes, sinks)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        if rows.start >= rows.stop:
            continue
        sight = _Sight(rule, rows.stop - rows.start, length, None if tree_mask is None else tree_mask[rows], q.device)
        if sight.stop == sight.start:
            if sinks is not None:
                lse[rows] = sinks
            continue
        keys = _gather(k_pages, page_table[b], sight, k_scale).permute(1, 2, 0)
        values = _gather(v_pages, page_table[b], sight, v_scale).transpose(0, 1)
        block = max(1, _SCORES_AT_ONCE // (num_q_heads * (sight.stop - sight.start)))
        for first in range(0, rows.stop - rows.start, block):
            part = slice(first, min(first + block, rows.stop - rows.start))
            here = slice(rows.start + part.start, rows.start + part.stop)
            out[here], lse[here] = _attend(q[here].double(), keys, values, rule, sight, part)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Rule:
    """What scores and masks follow: the same for every sequence of a call."""

    scale: float
    causal: bool
    window: Window
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None

    @property
    def left(self) -> int | None:
        return self.window[0] if isinstance(self.window, tuple) else self.window

    @property
    def right(self) -> int | None:
        return self.window[1] if isinstance(self.window, tuple) else None


class _Sight:
    """Positions of a sequence's queries and keys, and which keys any query can see: [start, stop)."""

    def __init__(self, rule: _Rule, queries: int, length: int, tree: Tensor | None, device: torch.device) -> None:
        self.rule = rule
        self.first = length - queries  # the key that belongs to the first query
        self.bits: Tensor | None = None
        lowest, highest = self.first, length - 1
        if tree is not None and queries <= 32 * tree.shape[1]:
            shifts = torch.arange(32, dtype=torch.int32, device=device)
            self.bits = ((tree[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :queries]
            # A node stands as deep as it has ancestors, itself among the bits of its row.
            self._tree_positions = self.first + self.bits.sum(dim=1) - 1
            lowest = min(self.first, int(self._tree_positions.min()))
        self.start = 0 if rule.left is None else max(0, lowest - rule.left + 1)
        self.stop = max(length, 0)
        if not rule.causal and rule.right is not None:
            self.stop = max(0, min(length, highest + rule.right + 1))
        self.stop = max(self.start, self.stop)
        self.queries = queries
        self.device = device

    @property
    def positions(self) -> Tensor:
        """Of the queries."""
        if self.bits is not None:
            return self._tree_positions
        return torch.arange(self.first, self.first + self.queries, device=self.device)

    def key_positions(self) -> Tensor:
        positions = torch.arange(self.start, self.stop, device=self.device)
        if self.bits is not None:
            own = slice(max(self.first, self.start), None)
            positions[own.start - self.start :] = self.positions[own.start - self.first :]
        return positions

    def distances(self, part: slice) -> Tensor:
        """Query position - key position, [queries of the part, keys]."""
        return self.positions[part, None] - self.key_positions()

    def visible(self, part: slice) -> Tensor | None:
        """[queries of the part, keys], or None where a lone query sees all of [start, stop)."""
        if self.queries == 1 and self.bits is None:
            return None
        distances, rule = self.distances(part), self.rule
        visible = torch.ones_like(distances, dtype=torch.bool)
        if self.bits is not None:
            own = max(self.first, self.start)
            visible[:, own - self.start :] = self.bits[part, own - self.first :]
        elif rule.causal:
            visible &= distances >= 0
        if rule.left is not None:
            visible &= distances < rule.left
        if rule.right is not None:
            visible &= distances >= -rule.right
        return visible


def _gather(pages: Tensor, page_ids: Tensor, sight: _Sight, scale: float | Tensor | None) -> Tensor:
    """The keys or values [sight.start, sight.stop) of a sequence, scaled: float64 [keys, heads, dim].

    Pages that hold none of them are not touched, and of the others only these slots are used.
    """
    page_size = pages.shape[1]
    first, last = sight.start // page_size, -(-sight.stop // page_size)
    ids = page_ids[first:last]
    slots = slice(sight.start - first * page_size, sight.stop - first * page_size)

    def pick(paged: Tensor) -> Tensor:
        return paged.index_select(0, ids).flatten(0, 1)[slots].double()

    picked = pick(pages)
    if scale is None:
        return picked
    if isinstance(scale, Tensor):
        # One number, one a head, or one a slot and head.
        factor = pick(scale) if scale.dim() == 3 else scale.double().reshape(-1)
        return picked * factor[..., None]
    return picked * scale


def _attend(q: Tensor, keys: Tensor, values: Tensor, rule: _Rule, sight: _Sight, part: slice) -> tuple[Tensor, Tensor]:
    """Some queries of one sequence, [n, num_q_heads, D]: results [n, num_q_heads, Dv] and LSE [n, num_q_heads]."""
    n, num_q_heads, head_dim = q.shape
    num_kv_heads, _, num_keys = keys.shape
    # Query heads h * G .. h * G + G - 1 share key head h: they are the rows of one product.
    packed = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(packed, keys).view(num_q_heads, n, num_keys) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.alibi_slopes is not None:
        scores = scores - rule.alibi_slopes.double()[:, None, None] * sight.distances(part).abs()
    visible = sight.visible(part)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))

    sink = None if rule.sinks is None else rule.sinks.double()[:, None, None].expand(-1, n, 1)
    logits = scores if sink is None else torch.cat([scores, sink], dim=-1)
    # Finite, so that -inf - peak is no NaN: where all logits are -inf, all weights are 0.
    peak = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    weights = torch.exp(logits - peak)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        weights = weights[..., :num_keys]
    result = _weigh(weights.reshape(num_kv_heads, -1, num_keys), values, visible).view(num_q_heads, n, -1)
    # The largest logit has weight 1, so a total below 1 is 0, and so is the result.
    result = result / total.clamp(min=1.0)
    return result.transpose(0, 1), (peak + total.log()).squeeze(-1).T


def _weigh(weights: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """weights @ values, in which a weight of zero silences even the NaN and infinities of a key that is not visible."""
    result = torch.bmm(weights, values)
    if visible is None or bool(result.isfinite().all()):
        return result
    result = torch.bmm(weights, values.masked_fill(~values.isfinite(), 0.0))
    seen = visible.double().repeat(weights.shape[1] // len(visible), 1)
    for special in (float("inf"), float("-inf"), float("nan")):
        holds = values.isnan() if special != special else values == special
        result = torch.where(seen @ holds.double() > 0, result + special, result)
    return result


def append_kv(
    k: Tensor,
    v: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor | None,
    slots: Tensor,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Writes keys and values into the slots of the pages; see `kernels.attention.append_kv`.

    Args:
        k: [T, num_kv_heads, D].
        v: [T, num_kv_heads, Dv], or None with v_pages None.
        k_pages: [N, page_size, num_kv_heads, D], written.
        v_pages: [N, page_size, num_kv_heads, Dv], written.
        slots: [T], page * page_size + offset; a token whose slot is not in the pages is not written.
        k_scale: as in `paged_attention`; one a slot and head is computed and written.
        v_scale: likewise.
    """
    num_pages, page_size = k_pages.shape[:2]
    written = (slots >= 0) & (slots < num_pages * page_size)
    slots = slots[written].long()
    page, offset = slots // page_size, slots % page_size
    for rows, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if rows is not None and pages is not None:
            _write(rows[written], pages, page, offset, scale)


def _write(rows: Tensor, pages: Tensor, page: Tensor, offset: Tensor, scale: float | Tensor | None) -> None:
    if pages.dtype.is_floating_point and pages.dtype.itemsize > 1:
        pages[page, offset] = rows.to(pages.dtype)
        return
    rows = rows.float()
    if isinstance(scale, Tensor) and scale.dim() == 3:
        factor = _row_scales(rows, pages.dtype)
        scale[page, offset] = factor.squeeze(-1)
    elif isinstance(scale, Tensor):
        factor = scale.reshape(-1, 1)
    else:
        factor = rows.new_tensor(1.0 if scale is None else scale)
    bytes_ = quantize(rows, factor, pages.dtype).view(torch.uint8)
    pages.view(torch.uint8)[page, offset] = bytes_


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _row_scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """max |x| / the dtype's largest number over the finite x of a row, [..., 1]; NaN for an int8 row with a NaN."""
    peak = rows.abs().masked_fill(~rows.isfinite(), 0.0).amax(dim=-1, keepdim=True)
    scales = peak / rows.new_tensor(_largest(dtype))
    scales = scales.masked_fill(scales < torch.finfo(torch.float32).tiny, 0.0)
    if dtype == torch.int8:
        scales = scales.masked_fill(rows.isnan().any(dim=-1, keepdim=True), float("nan"))
    return scales


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, divided in float32 and rounded to nearest even, as fp8 or int8.

    What is too large, infinities too, becomes the largest number of its sign; a scale of 0 gives 0; NaN stays NaN in
    fp8 and becomes 0 in int8.
    """
    limit = _largest(dtype)
    ratio = (x / scale).masked_fill(scale == 0, 0.0)
    ratio = torch.where(x.isnan(), x, ratio).clamp(-limit, limit)
    if dtype == torch.int8:
        return ratio.nan_to_num(nan=0.0).round().to(torch.int8)
    return ratio.to(dtype)


def merge_attention(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys: sum_i exp(lse_i) out_i / sum_i exp(lse_i), and the joint LSE.

    Args:
        outs: S tensors [T, num_heads, Dv]. Where a part's LSE is -inf its result is ignored, whatever it holds.
        lses: S tensors [T, num_heads], natural logarithms.

    Returns:
        [T, num_heads, Dv] in the dtype of outs and float32 [T, num_heads]; 0 and -inf where every LSE is -inf.
    """
    parts = torch.stack(tuple(outs)).double()
    logs = torch.stack(tuple(lses)).double()[..., None]
    absent = logs == float("-inf")
    peak = logs.amax(dim=0)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = torch.exp(logs - peak)
    total = weights.sum(dim=0)
    out = (weights * parts.masked_fill(absent, 0.0)).sum(dim=0) / total
    out = out.masked_fill(total == 0, 0.0)
    return out.to(outs[0].dtype), (peak + total.log()).squeeze(-1).float()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "paged_attention": paged_attention,
    "append_kv": append_kv,
    "merge_attention": merge_attention,
}
