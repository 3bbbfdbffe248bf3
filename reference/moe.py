"""Mixtures of experts, token by token and expert by expert, in float64.

The weights of E experts are a tensor [E, N, K], or a quantised weight of shape (E * N, K).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .layers import gelu_and_mul, silu_and_mul
from .quantized import dequantize

Tensor = torch.Tensor


def route(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    mask_logits: Tensor | None = None,
    min_prob: float = 0.0,
    top_p: float = 1.0,
    null_experts: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each token's experts and weights, and the slots by expert.

    Args:
        logits: [T, C]; the last null_experts of the C columns stand for no expert.
        top_k: slots K a token.
        scoring: "softmax", "topk_softmax" (over the chosen logits alone) or "sigmoid".
        bias: [C], added to the scores for the choice alone.
        num_groups: the columns are so many groups of neighbours.
        top_groups: how many of them can be chosen from.
        renormalize: weights are divided by their sum over the slots that are left.
        scale: multiplies the weights in the end.
        mask_logits: [T, C]; a slot whose expert's is not above 0 is taken away.
        min_prob: a slot of a lower weight is taken away.
        top_p: slots behind those whose weights add up to it are taken away.
        null_experts: see logits.

    Returns:
        experts [T, K] int32, weights [T, K] float32, offsets [E + 1] and order [T * K] int32.
    """
    values = logits.double()
    scores = torch.sigmoid(values) if scoring == "sigmoid" else torch.softmax(values, dim=-1)
    rank = values if bias is None else scores + bias.double()
    chosen = _best(rank, _group_mask(rank, num_groups, top_groups, bias is not None), top_k)
    if scoring == "topk_softmax":
        weights = torch.softmax(values.gather(1, chosen), dim=-1)
    else:
        weights = scores.gather(1, chosen)
    before = weights.cumsum(dim=-1) - weights
    kept = weights >= min_prob
    if top_p < 1:
        kept &= (before < top_p) | (before == 0)
    kept &= chosen < logits.shape[1] - null_experts
    if mask_logits is not None:
        kept &= mask_logits.gather(1, chosen) > 0
    kept &= ~(scores.isnan() | rank.isnan()).any(dim=-1, keepdim=True)
    weights = weights.where(kept, 0)
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / total.where(total > 0, 1)
    experts = chosen.where(kept, -1).int()
    offsets, order = group_by_expert(experts, logits.shape[1] - null_experts)
    return experts, (weights * scale).float(), offsets, order


def _group_mask(rank: Tensor, num_groups: int, top_groups: int, two_best: bool) -> Tensor:
    """[T, C]: whether a column's group is among the best."""
    groups = rank.unflatten(1, (num_groups, -1))
    size = groups.shape[2]
    quality = groups.topk(min(2 if two_best else 1, size), dim=-1).values.sum(dim=-1)
    among_best = torch.zeros_like(quality, dtype=torch.bool)
    among_best.scatter_(1, _best(quality, torch.ones_like(among_best), top_groups), True)
    return among_best.repeat_interleave(size, dim=1)


def _best(rank: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The `count` columns of the highest rank, equal ones by lower id, those that are not allowed after all others."""
    by_rank = torch.sort(rank, dim=1, descending=True, stable=True).indices
    first = torch.sort((~allowed.gather(1, by_rank)).int(), dim=1, stable=True).indices
    return by_rank.gather(1, first)[:, :count]


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Where each expert's slots are in an order by expert.

    Args:
        experts: [T, K]; an id outside 0 .. num_experts - 1 is a slot that is not used.
        num_experts: E.

    Returns:
        offsets [E + 1] int32, and order [T * K] int32: used slots by expert, rising within one, then -1.
    """
    order = torch.full((experts.numel(),), -1, dtype=torch.int32, device=experts.device)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    at = 0
    for expert in range(num_experts):
        slots = (experts.reshape(-1) == expert).nonzero().flatten()
        order[at : at + len(slots)] = slots.int()
        at += len(slots)
        offsets[expert + 1] = at
    return offsets, order


def expert_matrix(w: Any, expert: int, num_experts: int) -> Tensor:
    """The weight of one expert, float64 [N, K]."""
    if isinstance(w, Tensor):
        return w[expert].double()
    rows = w.shape[0] // num_experts
    return dequantize(w, torch.arange(expert * rows, (expert + 1) * rows, device=w.data.device)).double()


def grouped_matmul(
    x: Tensor, w: Any, offsets: Tensor, bias: Tensor | None = None, gather: Tensor | None = None
) -> Tensor:
    """x[i] @ w[e].T + bias[e] for expert e's rows offsets[e] .. offsets[e + 1] - 1; 0 for rows of no expert.

    Args:
        x: [M, K].
        w: E weights (N, K).
        offsets: [E + 1].
        bias: [E, N] or None.
        gather: [M'] or None: row i is x[gather[i]], 0 where there is none.

    Returns:
        [M or M', N] in x's dtype.
    """
    experts = len(offsets) - 1
    rows = x.double()
    if gather is not None:
        known = (gather >= 0) & (gather < len(x))
        rows = (
            rows[gather.where(known, 0).long()].where(known[:, None], 0)
            if len(x)
            else rows.new_zeros(len(gather), x.shape[1])
        )
    features = w.shape[1] if isinstance(w, Tensor) else w.shape[0] // experts
    out = rows.new_zeros(len(rows), features)
    for expert in range(experts):
        mine = slice(int(offsets[expert]), int(offsets[expert + 1]))
        if mine.start < mine.stop:
            out[mine] = rows[mine] @ expert_matrix(w, expert, experts).T
            if bias is not None:
                out[mine] += bias[expert].double()
    return out.to(x.dtype)


def fused_moe(
    x: Tensor,
    gate_up: Any,
    down: Any,
    routing: Any,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """sum over a token's used slots of weight * (down (act(gate x) * (up x)) + down_bias), rounded once.

    Args:
        x: [T, H].
        gate_up: E weights (2 F, H), or a pair of E weights (F, H).
        down: E weights (H, F).
        routing: `experts` and `weights` [T, K], `offsets` [E + 1].
        activation: "silu" or "gelu_tanh".
        gate_up_bias: [E, 2 F] or None.
        down_bias: [E, H] or None.

    Returns:
        [T, H] in x's dtype.
    """
    experts = len(routing.offsets) - 1
    activate = silu_and_mul if activation == "silu" else gelu_and_mul
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in routing.experts.unique().tolist():
        if not 0 <= expert < experts:
            continue
        tokens, slots = (routing.experts == expert).nonzero(as_tuple=True)
        parts = gate_up if isinstance(gate_up, tuple) else (gate_up,)
        matrix = torch.cat([expert_matrix(part, expert, experts) for part in parts])
        inner = x[tokens].double() @ matrix.T
        if gate_up_bias is not None:
            inner += gate_up_bias[expert].double()
        result = activate(inner) @ expert_matrix(down, expert, experts).T
        if down_bias is not None:
            result += down_bias[expert].double()
        out.index_add_(0, tokens, result * routing.weights[tokens, slots, None].double())
    return out.to(x.dtype)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "route": route,
    "group_by_expert": group_by_expert,
    "grouped_matmul": grouped_matmul,
    "fused_moe": fused_moe,
}
